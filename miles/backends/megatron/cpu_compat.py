"""Lets megatron-core 0.16 run where there is no GPU.

megatron-core calls `torch.cuda.current_device()` and allocates with `device="cuda"` in every forward pass, so it
cannot run on a CPU as published. `install()` gives the modules of `megatron.core` a stand-in for their module-global
name `torch`, which answers those calls with the CPU. The real torch is touched in two places only: `Tensor.cuda`,
which becomes the identity, and `Tensor.type()` without arguments when it is called from Megatron's optimizer, which
compares type names with CUDA's. Where CUDA is available nothing is installed.

The module also repairs three faults of the torch-AdamW fallback of Megatron's DistributedOptimizer (used where neither
Transformer Engine nor apex is installed); each repair names its fault.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

_MEGATRON_PREFIX = "megatron.core"
_FACTORY_NAMES = (
    "tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "rand",
    "randn",
    "randint",
    "as_tensor",
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
    "eye",
)


class _NullStream:
    """Takes the place of torch.cuda.Stream and torch.cuda.Event: the CPU has one stream and is always done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _NullStream:
        return self

    def __exit__(self, *exc: object) -> bool:
        return False

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a tensor factory so that a CUDA device argument means the CPU."""

    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if type(device) is int or str(device).startswith("cuda"):
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapped


def _torch_stand_in() -> types.ModuleType:
    cpu = torch.device("cpu")

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def no_bytes(*args: Any, **kwargs: Any) -> int:
        return 0

    cuda = types.ModuleType("torch.cuda[cpu]")
    cuda.__dict__.update(
        current_device=lambda: cpu,
        set_device=nothing,
        device_count=lambda: 1,
        is_available=lambda: False,
        synchronize=nothing,
        empty_cache=nothing,
        Stream=_NullStream,
        Event=_NullStream,
        stream=lambda *args: contextlib.nullcontext(),
        current_stream=_NullStream,
        default_stream=_NullStream,
        manual_seed=torch.manual_seed,
        get_rng_state=lambda *args, **kwargs: torch.get_rng_state(),
        set_rng_state=lambda state, *args, **kwargs: torch.set_rng_state(state),
        memory_allocated=no_bytes,
        max_memory_allocated=no_bytes,
        memory_reserved=no_bytes,
        __getattr__=lambda name: getattr(torch.cuda, name),
    )
    stand_in = types.ModuleType("torch[cpu]")
    for name in _FACTORY_NAMES:
        stand_in.__dict__[name] = _on_cpu(getattr(torch, name))
    stand_in.__dict__.update(cuda=cuda, __getattr__=lambda name: getattr(torch, name))
    return stand_in


def _repair_random(module: types.ModuleType) -> None:
    def get_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    module.__dict__.update(_get_cuda_rng_state=get_state, _set_cuda_rng_state=set_state)


def repair_distributed_optimizer(module: types.ModuleType) -> None:
    """Repair DistributedOptimizer over torch.optim.AdamW; harmless, and not needed, over a fused Adam.

    Three faults of megatron-core 0.16.1, all on the loading path:
    1. `_set_main_param_and_optimizer_states` expects a "step" per parameter that the loaded state no longer holds,
       and copies into leaves that require grad;
    2. `load_state_dict` gives every parameter the same `step` tensor, which AdamW then advances once per parameter;
    3. `sharded_state_dict(is_loading=True)` asserts that the optimizer has stepped, which a fresh one has not.
    """
    cls = module.DistributedOptimizer
    set_states, load_state_dict, sharded_state_dict = (
        cls._set_main_param_and_optimizer_states,
        cls.load_state_dict,
        cls.sharded_state_dict,
    )

    def set_states_with_step(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state:
            tensors = {**tensors, "step": state["step"]}
        with torch.no_grad():
            set_states(self, model_param, tensors)

    def load_with_own_steps(self: Any, state_dict: Any) -> None:
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    def sharded_with_primed_state(
        self: Any, model_sd: Any, is_loading: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        if is_loading and isinstance(self.optimizer, torch.optim.AdamW):
            for group in self.optimizer.param_groups:
                for param in group["params"]:
                    if not self.optimizer.state[param]:
                        self.optimizer.state[param] = {
                            "step": torch.tensor(0.0),
                            "exp_avg": torch.zeros_like(param),
                            "exp_avg_sq": torch.zeros_like(param),
                        }
        return sharded_state_dict(self, model_sd, is_loading, *args, **kwargs)

    cls._set_main_param_and_optimizer_states = set_states_with_step
    cls.load_state_dict = load_with_own_steps
    cls.sharded_state_dict = sharded_with_primed_state


def _do_not_compile(module: types.ModuleType) -> None:
    # Importing torch's compiler takes several CPU seconds in each process, and no fused kernel is used on a CPU.
    module.disable_jit_fuser()


_REPAIRS: dict[str, Callable[[types.ModuleType], None]] = {
    "megatron.core.jit": _do_not_compile,
    "megatron.core.tensor_parallel.random": _repair_random,
    "megatron.core.optimizer.distrib_optimizer": repair_distributed_optimizer,
}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finder that runs our adjustments right after a megatron.core module's own code has run."""

    def __init__(self, stand_in: types.ModuleType) -> None:
        self._stand_in = stand_in

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MEGATRON_PREFIX and not fullname.startswith(_MEGATRON_PREFIX + "."):
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            if module.__dict__.get("torch") is torch:
                module.__dict__["torch"] = self._stand_in
            repair = _REPAIRS.get(module.__name__)
            if repair is not None:
                repair(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _patch_tensor() -> None:
    original_type = torch.Tensor.type

    def to_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original_type(self, *args, **kwargs)
        if args or kwargs:
            return result
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return result.replace("torch.", "torch.cuda.", 1) if caller.startswith("megatron.core.optimizer") else result

    torch.Tensor.cuda = to_cuda  # type: ignore[method-assign, assignment]
    torch.Tensor.type = type_name  # type: ignore[method-assign, assignment]


_installed = False


def install() -> None:
    """Prepare this process for megatron-core on the CPU. Idempotent; does nothing where CUDA is available.

    Must run before the first import of `megatron.core`.
    """
    global _installed
    if _installed or torch.cuda.is_available():
        return
    early = [name for name in sys.modules if name.startswith(_MEGATRON_PREFIX)]
    assert not early, f"cpu_compat.install() must run before megatron.core is imported; already loaded: {early[0]}"
    sys.meta_path.insert(0, _AfterImport(_torch_stand_in()))
    _patch_tensor()
    _installed = True
