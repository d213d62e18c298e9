"""Stand-in for SGLang's kernels, whose wheels are for CUDA: SGLang imports the package wherever it runs.

It can be imported, with any submodule and any name, and raises ``NotImplementedError`` where a kernel is called. A
model in fp32 on a CPU, with ``attention_backend: torch_native``, calls none. For tests alone.
"""

import importlib.abc
import importlib.machinery
import sys
import types


class _Kernel:
    def __init__(self, name):
        self._name = name

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self._name}: there are no kernels of SGLang here, only their stand-in")

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{self._name}.{name}")


def _lookup(module):
    def look_up(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{module}.{name}")

    return look_up


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if not name.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__, module.__getattr__ = [], _lookup(spec.name)
        return module

    def exec_module(self, module):
        pass


__version__ = "0.4.10"
__getattr__ = _lookup(__name__)
sys.meta_path.append(_Submodules())
