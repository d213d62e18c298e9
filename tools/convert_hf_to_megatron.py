"""A Hugging Face folder into Megatron's distributed format: ``mopd convert hf-to-megatron`` as a script.

python tools/convert_hf_to_megatron.py models/qwen3 out/megatron --tensor-model-parallel-size 2
torchrun --nproc-per-node 8 tools/convert_hf_to_megatron.py models/large out/megatron --resume
"""

from __future__ import annotations

import sys

from mopd.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["convert", "hf-to-megatron", *sys.argv[1:]]))
