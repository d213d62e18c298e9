"""Every command that a page shows runs, or says who runs it, or why nobody can. Remarks above blocks: ``pages.py``."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from mopd.cli.main import main
from mopd.conversion.hf.pretrained import load_weights
from tests.fixtures.pages import PAGES, ROOT, Block, blocks
from tests.fixtures.tiny_models import make_hf_model, make_tokenizer

BLOCKS = [block for page in PAGES for block in blocks(page)]
RUN_ELSEWHERE = {"first_run.md": "tests/integration/test_first_run.py"}
"""Page -> the test that runs all its blocks, in order."""
OURS = [block for block in BLOCKS if not block.marker and block.page.name not in RUN_ELSEWHERE]


def test_blocks_are_found() -> None:
    assert len(BLOCKS) > 15 and len(OURS) >= 2
    assert any(words[:2] == ["mopd", "train"] for block in BLOCKS for words in block.commands)
    for page, test in RUN_ELSEWHERE.items():
        assert page in (ROOT / test).read_text(encoding="utf-8")


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.marker], ids=lambda block: block.place)
def test_what_is_not_run_here_says_why(block: Block) -> None:
    kind, _, rest = block.marker.partition(": ")
    if kind == "not run":
        assert len(rest.split()) > 1, f"{block.place}: say why in words"
        return
    assert kind == "run by", f"{block.place}: write <!-- run by: FILE --> or <!-- not run: REASON -->"
    told = (ROOT / rest).read_text(encoding="utf-8")
    for words in block.commands:
        called = words[words.index("mopd") + 1 :] if "mopd" in words else [Path(words[0]).stem, *words[1:]]
        names = called[: 2 if called[0] in ("bench", "convert", "make") else 1]
        assert all(re.search(rf"\b{re.escape(name)}\b", told) for name in names), (
            f"{block.place}: {rest} has no {names}"
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages' commands name, in a place of its own."""
    root = tmp_path_factory.mktemp("docs")
    for number, name in enumerate(("qwen3", "base", "math", "code", "large")):
        make_hf_model(root / "models" / name, "qwen3", seed=number)
        make_tokenizer(root / "models" / name)
    model, _ = load_weights(root / "models" / "base", torch.float32)
    target = "model.layers.0.self_attn.q_proj"
    rows, columns = model.get_submodule(target).weight.shape
    weights = {
        f"base_model.model.{target}.lora_A.weight": torch.randn(2, columns),
        f"base_model.model.{target}.lora_B.weight": torch.randn(rows, 2),
    }
    (root / "adapters" / "math").mkdir(parents=True)
    save_file(weights, root / "adapters" / "math" / "adapter_model.safetensors")
    adapter = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none"}
    (root / "adapters" / "math" / "adapter_config.json").write_text(json.dumps(adapter))
    return root


def fitted(words: list[str], folder: Path) -> list[str]:
    """With sizes of the stand-ins in the place of real ones."""
    size = AutoConfig.from_pretrained(folder / "models" / "qwen3").vocab_size
    return [{"151669": str(size)}.get(word, word) for word in words]


@pytest.mark.parametrize("block", OURS, ids=lambda block: block.place)
def test_it_runs(
    block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    for words in block.commands:
        assert words[0] == "mopd", f"{block.place}: {words[0]} needs a remark: who runs it, or why nobody can?"
        step = next((word for word in words if "checkpoints/step_" in word), None)
        if step is not None and not os.path.exists(step):  # a run's checkpoint: the converted one has all that is read
            shutil.copytree("out/megatron", step)
        code = main(fitted(words[1:], folder))
        assert code == 0, f"{block.place}: {' '.join(words)}: {capfd.readouterr().err}"


def test_the_example_of_the_losses_runs() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    _, example = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)  # the first: tests/integration/test_api.py
    names: dict[str, torch.Tensor] = {}
    exec(example, names)
    assert torch.isfinite(names["loss"]) and names["loss"] > 0
    assert names["logits"].grad is not None and names["logits"].grad.abs().sum() > 0
