"""Stand-in for Triton in the process tree of an SGLang server on a CPU.

SGLang imports Triton at module level even where none of its kernels will run. Here a kernel can be defined, decorated,
tuned and imported; launching one raises, so that no wrong number can come out of it.
"""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType

# At least 3.5, or SGLang takes paths meant for releases of Triton that are long gone.
__version__ = "3.5.0"


class _Refusal:
    """A name of Triton that may be looked up, nested and used as a decorator's argument, but never computed with."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> "_Refusal":
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _Refusal(f"{self._name}.{attribute}")

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self._name} needs a GPU: this server runs on a CPU without Triton")

    def __repr__(self) -> str:
        return f"<{self._name}: not available on a CPU>"


class JITFunction:
    """A defined kernel: it keeps its Python function and refuses to be launched."""

    def __init__(self, fn):
        self.fn = fn
        self.__name__ = getattr(fn, "__name__", "kernel")
        self.__doc__ = fn.__doc__

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"Triton kernel {self.__name__} was launched, but this server runs on a CPU")

    run = warmup = __call__


def _decorator(fn=None, **options):
    if fn is None:
        return JITFunction
    return fn if isinstance(fn, JITFunction) else JITFunction(fn)


jit = _decorator


def autotune(*args, **kwargs):
    return _decorator


def heuristics(*args, **kwargs):
    return _decorator


class Config:
    """Tuning choice of a kernel; stored, never used."""

    def __init__(self, kwargs, num_warps=4, num_stages=3, **others):
        self.kwargs = kwargs
        self.num_warps = num_warps
        self.num_stages = num_stages
        self.others = others


def cdiv(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


class _RefusedType(Exception):
    """Base of Triton's types here: they can be named in except clauses, inherited from and compared, not built."""

    def __init__(self, *args, **kwargs):
        raise NotImplementedError(f"triton type {type(self).__name__} needs a GPU: this server runs on a CPU")


class _StandInModule(ModuleType):
    """A submodule of Triton, any of them: every unknown name in it refuses to work."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        refusal = type(name, (_RefusedType,), {}) if name[0].isupper() else _Refusal(f"{self.__name__}.{name}")
        setattr(self, name, refusal)
        return refusal


# Only these trees exist; a probe for anything else gets the ImportError that it is looking for. torch's own compiler
# reads some of them when it is imported, and finds no device to compile for.
_SUBMODULES = ("triton.language", "triton.runtime", "triton.testing", "triton.compiler", "triton.backends")


class _SubmoduleFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if any(fullname == tree or fullname.startswith(tree + ".") for tree in _SUBMODULES):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _StandInModule(spec.name)

    def exec_module(self, module):
        if module.__name__ == "triton.language":
            # Module-level constants are wrapped in constexpr and read back as plain values.
            module.constexpr = lambda value: value
        elif module.__name__ == "triton.runtime.jit":
            module.JITFunction = JITFunction
        elif module.__name__ == "triton.backends":
            module.backends = {}


sys.meta_path.append(_SubmoduleFinder())

import triton.backends.compiler  # noqa: E402
import triton.compiler.compiler  # noqa: E402
import triton.language  # noqa: E402
import triton.runtime.errors  # noqa: E402
import triton.runtime.jit  # noqa: E402
import triton.testing  # noqa: E402, F401
