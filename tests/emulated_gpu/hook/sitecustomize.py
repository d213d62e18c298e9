"""Give this process emulated GPUs as it imports torch. Python runs this file where its folder is in ``PYTHONPATH``;
``tests/emulated_gpu/start.py`` puts it there."""

import ctypes
import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType


class _TorchFinder(importlib.abc.MetaPathFinder):
    """Finds torch once, and has the devices loaded before it and its Python half after it."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        numbers = [*range(int(os.environ["EMULATED_GPUS"]))]
        if visible is not None:
            numbers = [int(number) for number in visible.split(",") if number.strip()]
        devices = ctypes.CDLL(os.environ["EMULATED_GPU_LIBRARY"], mode=ctypes.RTLD_GLOBAL)
        devices.emulated_install(len(numbers))
        load = spec.loader.exec_module

        def load_with_devices(module: ModuleType) -> None:
            load(module)
            from tests.emulated_gpu import collectives, kernels, torch_cuda

            torch_cuda.install(devices, numbers)
            kernels.install()
            collectives.install(devices)

        spec.loader.exec_module = load_with_devices
        return spec


if "EMULATED_GPU_LIBRARY" in os.environ:
    if "TRITON_INTERPRET" not in os.environ:  # nothing here runs what Triton compiles
        sys.modules["triton"] = None  # type: ignore[assignment]
    sys.meta_path.insert(0, _TorchFinder())
