"""The one place that knows whether this process computes with CUDA and NCCL or with the CPU and gloo."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

import torch


@dataclass(frozen=True)
class Device:
    """Where tensors live and which library moves them between processes."""

    kind: Literal["cpu", "cuda"]
    index: int = 0

    @classmethod
    def from_args(cls, args: Any) -> Device:
        """Resolve `args.device` ("auto", "cpu" or "cuda") on this machine.

        Raises:
            ValueError: CUDA was asked for and there is none, or the CPU was asked for in a process that already uses
                CUDA.
        """
        requested = args.device
        if requested == "cpu" and not torch.cuda.is_initialized():
            # megatron-core decides at import time by what CUDA reports, so a CPU run must not see a GPU.
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        available = torch.cuda.is_available()
        if requested == "cpu":
            if available:
                raise ValueError(
                    "--device cpu: CUDA is already in use in this process; start it with CUDA_VISIBLE_DEVICES=''"
                )
            return cls("cpu")
        if requested == "cuda" and not available:
            raise ValueError("--device cuda: no CUDA device is visible to this process")
        if requested not in ("auto", "cuda"):
            raise ValueError(f"--device: expected auto, cpu or cuda, got {requested!r}")
        if not available:
            return cls("cpu")
        return cls("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())

    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", self.index) if self.is_cuda else torch.device("cpu")

    @property
    def distributed_backend(self) -> str:
        """Name of the torch.distributed backend for tensors on this device."""
        return "nccl" if self.is_cuda else "gloo"

    def activate(self) -> None:
        """Make this device current and prepare megatron-core for it; call before importing Megatron."""
        if self.is_cuda:
            torch.cuda.set_device(self.index)
            return
        from miles.backends.megatron import cpu_compat

        cpu_compat.install()

    def synchronize(self) -> None:
        """Wait for queued kernels, so that a wall-clock reading means something."""
        if self.is_cuda:
            torch.cuda.synchronize(self.index)
