"""Start-up hook of every Python process of an SGLang server on a CPU.

SGLang honours `sampling_seed` only in its deterministic mode, which it refuses for the attention backend that runs on
a CPU and which would swap in Triton kernels. PyTorch's own kernels are deterministic there, so the backend is admitted
and the swap is left out. Its processes are forked, not spawned: without CUDA nothing forbids it, and each would spend
many CPU seconds on imports that the first has done. Decode attention works on all requests at once. Modules are
changed when they are imported: nothing heavy is imported for it.
"""

import importlib.abc
import importlib.util
import os
import sys


def _admit_torch_native(module) -> None:
    module.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")


def _leave_kernels_alone(module) -> None:
    module.enable_batch_invariant_mode = lambda *args, **kwargs: None


def _fork_processes(module) -> None:
    configure = module._set_envs_and_config

    def configure_and_fork(server_args) -> None:
        configure(server_args)
        module.mp.set_start_method("fork", force=True)

    module._set_envs_and_config = configure_and_fork


def _decode_in_batches(module) -> None:
    import batched_decode

    batched_decode.install(module.TorchNativeAttnBackend)


_CHANGES = {
    "sglang.srt.arg_groups.choices": _admit_torch_native,
    "sglang.srt.batch_invariant_ops": _leave_kernels_alone,
    "sglang.srt.entrypoints.engine": _fork_processes,
    "sglang.srt.layers.attention.torch_native_backend": _decode_in_batches,
}


class _ChangeOnImport(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        change = _CHANGES.pop(fullname, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        original = spec.loader.exec_module

        def exec_module(module):
            original(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _ChangeOnImport())


def _run_the_hidden_sitecustomize() -> None:
    """Run the environment's own sitecustomize, which this file hides by standing earlier on the path."""
    here = os.path.dirname(os.path.abspath(__file__))
    for folder in sys.path:
        candidate = os.path.join(folder or os.curdir, "sitecustomize.py")
        if os.path.abspath(folder or os.curdir) != here and os.path.isfile(candidate):
            spec = importlib.util.spec_from_file_location("hidden_sitecustomize", candidate)
            if spec is not None and spec.loader is not None:
                spec.loader.exec_module(importlib.util.module_from_spec(spec))
            return


_run_the_hidden_sitecustomize()
