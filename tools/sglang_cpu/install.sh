#!/usr/bin/env bash
# install.sh PYTHON FOLDER: a virtual environment with SGLang for this machine's CPU, beside the one of PYTHON, whose
# torch and other packages it uses. SGLang pins builds for CUDA, so that its own dependencies are named here.
set -euo pipefail
here=$(dirname "$0") python=$1 folder=$2
"$python" -m venv "$folder"
packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$packages/mopd_packages.pth"
cp -r "$here/sgl_kernel" "$here/../torchvision_cpu.pth" "$packages"
# shellcheck disable=SC2086  # arguments of pip
"$folder/bin/pip" install --quiet ${PIP_ARGS:-} --no-deps -r "$here/requirements.txt"
touch "$folder/.installed"
