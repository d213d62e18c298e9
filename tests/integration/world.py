"""A whole small world on disk: a weak student, two experts that each answer one fixed word, prompts, a recipe.

``mopd`` runs as a user would start it, in a process of its own.
"""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from mopd.base.metrics import GROUP_ROOMS
from tests.fixtures.tiny_models import make_hf_model, make_tokenizer

REPOSITORY = Path(__file__).parents[2]
ANSWERS = {"left": "ab", "right": "xy"}
"""Domain -> the one answer that its expert gives."""
TIMEOUT_S = 240.0


class World:
    """Paths of the models and data, and the recipe that uses them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.student = folder / "student"
        self.teachers = {domain: folder / f"teacher_{domain}" for domain in ANSWERS}
        self.train = folder / "train.parquet"
        self.validation = folder / "validation.parquet"

    def recipe(self, run_dir: Path, **overrides: Any) -> dict[str, Any]:
        """The recipe as a mapping; ``a__b=value`` replaces the value of key ``a.b``."""
        tree: dict[str, Any] = {
            "run_dir": str(run_dir),
            "seed": 3,
            "student": {
                "model": str(self.student),
                "dtype": "float32",
                "parallel": {"tensor_model_parallel_size": 2},
                "optimizer": {"lr": 2.0e-3, "lr_warmup_steps": 2},
                "max_tokens_per_micro_batch": 128,
            },
            "teachers": {d: {"model": str(path), "domains": [d]} for d, path in self.teachers.items()},
            "data": {"train": [str(self.train)], "validation": [str(self.validation)], "max_prompt_length": 32},
            "rollout": {"max_response_length": 4},
            "loss": {"type": "topk_forward_kl", "top_k": 8},
            "schedule": {"steps": 6, "prompts_per_step": 8, "wait_timeout_s": 120},
            "rewards": {"default": {"type": "exact_match"}},
            "validation": {"every_steps": 3},
            "checkpoint": {"every_steps": 2},
            "metrics": {"diagnostics_every_steps": 2, "tensorboard": False},
        }
        for dotted, value in overrides.items():
            *parents, last = dotted.split("__")
            section = tree
            for name in parents:
                section = section.setdefault(name, {})
            section[last] = value
        return copy.deepcopy(tree)

    def write_recipe(self, run_dir: Path, **overrides: Any) -> Path:
        """Write ``recipe(...)`` beside ``run_dir`` and return the file."""
        path = run_dir.with_suffix(".yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(self.recipe(run_dir, **overrides)), encoding="utf-8")
        return path


def build_world(folder: Path) -> World:
    """Make models and data; takes seconds."""
    world = World(folder)
    for path in (world.student, *world.teachers.values()):
        make_hf_model(path, "qwen3", seed=1, scale=0.1)
        make_tokenizer(path)
    for domain, path in world.teachers.items():
        train_expert(path, dict.fromkeys(ANSWERS, ANSWERS[domain]))
    write_prompts(world.train, num_rows=40, start=0)
    write_prompts(world.validation, num_rows=12, start=1000)
    return world


def write_prompts(
    path: Path,
    *,
    num_rows: int,
    start: int,
    domains: tuple[str, ...] = tuple(ANSWERS),
    answers: dict[str, str] = ANSWERS,
) -> None:
    """Rows in the schema that practitioners have, domains in turn."""
    rows = []
    for index in range(start, start + num_rows):
        domain = domains[index % len(domains)]
        rows.append(
            {
                "data_source": domain,
                "prompt": [{"role": "user", "content": f"{domain} {index}"}],
                "reward_model": {"style": "rule", "ground_truth": answers.get(domain, "?")},
                "extra_info": {"index": index},
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), path)


def train_expert(folder: Path, answers: dict[str, str], num_steps: int = 60) -> None:
    """Teach the model to answer every prompt of a domain with its one answer and the stop token."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    pairs = [
        (
            tokenizer.apply_chat_template(
                [{"role": "user", "content": f"{domain} {i}"}], add_generation_prompt=True, return_dict=False
            ),
            [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id],
        )
        for domain, answer in answers.items()
        for i in range(100, 110)
    ]
    width = max(len(prompt) + len(ending) for prompt, ending in pairs)
    rows = [[*prompt, *ending] for prompt, ending in pairs]
    tokens = torch.tensor([[*row, *[tokenizer.pad_token_id] * (width - len(row))] for row in rows])
    labels = torch.full_like(tokens, -100)
    for label, (prompt, ending) in zip(labels, pairs, strict=True):
        label[len(prompt) : len(prompt) + len(ending)] = torch.tensor(ending)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(input_ids=tokens, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


def environment() -> dict[str, str]:
    """A clean environment for the command: nothing of torchrun, one thread per rank."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TORCHELASTIC", "RANK", "WORLD_"))}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}


def mopd(*arguments: str | Path, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "mopd", *map(str, arguments)],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def start_mopd(*arguments: str | Path, **variables: str) -> subprocess.Popen[str]:
    """Start the command, with more in its environment, and return at once."""
    return subprocess.Popen(
        [sys.executable, "-m", "mopd", *map(str, arguments)],
        cwd=REPOSITORY,
        env=environment() | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def takes_signals(pid: int) -> bool:
    """Whether a launcher has come to where signals end its ranks: their last handler is SIGQUIT's, and Python has none
    of its own. Its guard has been started by then, and no rank before."""
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGQUIT - 1) & 1)


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """Lines of ``metrics.jsonl`` without what differs between two equal runs: times, rates and memory."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in line.items() if not is_volatile(name)} for line in lines]


def is_volatile(metric: str) -> bool:
    """A time, a rate or memory; what groups count (samples, tokens, waiting requests, bytes) is none."""
    room, _, rest = metric.partition("/")
    return room in ("timing", "rate", "memory") or (room in GROUP_ROOMS and rest.split("/")[0].endswith("_s"))


def read_validation(run_dir: Path) -> list[dict[str, Any]]:
    """Lines of ``validation.jsonl`` without times."""
    lines = [json.loads(line) for line in (run_dir / "validation.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in line.items() if name != "wall_s"} for line in lines]
