"""A distributed checkpoint into a Hugging Face folder: ``mopd convert megatron-to-hf`` as a script.

python tools/convert_megatron_to_hf.py runs/mine/checkpoints/step_00000100 out/hf
torchrun --nproc-per-node 8 tools/convert_megatron_to_hf.py out/megatron out/hf --resume
"""

from __future__ import annotations

import sys

from mopd.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["convert", "megatron-to-hf", *sys.argv[1:]]))
