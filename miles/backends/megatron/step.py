"""Forward and backward passes through Megatron's schedules, with loss denominators that are global.

An objective turns the model's outputs for the response tokens of one micro-batch into a SUM of per-token losses and
sums of metrics. This module divides once, by counts taken over the whole batch of all data-parallel ranks, so that
the update does not depend on how rows were dealt to ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

from miles.algorithms.aggregation import add_metrics
from miles.backends.megatron.micro_batch import MicroBatch, build_micro_batch, split_by_row
from miles.backends.megatron.parallel import ParallelState

Metrics = dict[str, Any]
Objective = Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, Metrics]]
"""(outputs [S, width] of all positions of this rank, micro-batch) -> (summed loss, summed metrics).

The sums are over all T tokens of the micro-batch, on every context-parallel rank; see MicroBatch.whole."""
Reader = Callable[[torch.Tensor, MicroBatch], torch.Tensor]
"""(outputs [S, width], micro-batch) -> numbers of each response token, [T] or [T, n]."""


class Stepper:
    """Runs one model over shards of column batches.

    A shard is this data-parallel rank's columns with an extra key `micro_batches`: lists of row numbers, the same
    number of lists on every data-parallel rank. All ranks of the model call every method together.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        parallel: ParallelState,
        device: torch.device,
        packed: bool = False,
        sequence_parallel: bool = False,
    ) -> None:
        self.model = model
        self.parallel = parallel
        self.device = device
        self.packed = packed
        self._length_multiple = parallel.tp_size if sequence_parallel else 1

    def _micro_batches(self, shard: dict[str, Any], columns: Sequence[str]) -> Iterator[MicroBatch]:
        for rows in shard["micro_batches"]:
            yield build_micro_batch(
                shard,
                rows,
                columns=columns,
                device=self.device,
                packed=self.packed,
                length_multiple=self._length_multiple,
                context_group=self.parallel.cp_group if self.parallel.cp_size > 1 else None,
            )

    def _run(
        self,
        shard: dict[str, Any],
        columns: Sequence[str],
        on_output: Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, Any]],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """One pass of the schedule; the second results of `on_output` on the last stage, nothing on others."""
        num_micro_batches = len(shard["micro_batches"])
        assert num_micro_batches > 0, "a shard needs at least one micro-batch"

        def forward_step(data: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
            micro_batch = next(data)
            output = model(
                micro_batch.input_ids,
                micro_batch.position_ids,
                None,
                packed_seq_params=_packed_params(micro_batch),
            )
            return output, partial(on_output, micro_batch)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=self._micro_batches(shard, columns),
            model=self.model,
            num_microbatches=num_micro_batches,
            # Neither is used: stages exchange the shapes of what they send.
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def accumulate_gradients(
        self,
        shard: dict[str, Any],
        objective: Objective,
        *,
        columns: Sequence[str],
        denominator: float,
        metric_names: Sequence[str],
    ) -> dict[str, float]:
        """Forward and backward over all micro-batches; gradients are left averaged and ready for the optimizer.

        Args:
            columns: Per-token columns that the objective reads.
            denominator: What the summed loss is divided by, counted over all data-parallel ranks.
            metric_names: Every name the objective may report; `_max` and `_min` names combine by maximum and minimum.

        Returns:
            Metric sums over all micro-batches and data-parallel ranks, and "loss", the same on every rank.
        """
        assert denominator > 0, "the batch has no trainable token"
        # Megatron averages over micro-batches and over data-parallel ranks, and adds up over context-parallel ones; a
        # sum over all is wanted, of which each context-parallel rank holds the gradient of its own tokens.
        scale = len(shard["micro_batches"]) * self.parallel.dp_size / denominator

        def on_output(micro_batch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
            loss_sum, metrics = objective(output.flatten(0, 1), micro_batch)
            # Without a token to predict this rank must still run the backward pass of the whole model.
            loss = loss_sum * scale + output.sum() * 0.0 if not len(micro_batch.positions_L) else loss_sum * scale
            return loss, {**metrics, "loss": loss_sum.detach().double()}

        parts = self._run(shard, columns, on_output, forward_only=False)
        metrics = self._reduce(add_metrics(parts), [*metric_names, "loss"])
        metrics["loss"] /= denominator
        return metrics

    @torch.no_grad()
    def read(self, shard: dict[str, Any], reader: Reader) -> dict[int, np.ndarray] | None:
        """Forward only: {sample index: float32 [response_length] or [response_length, n]} on output ranks, else
        None.
        """

        def on_output(micro_batch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, dict[int, np.ndarray]]:
            numbers = reader(output.flatten(0, 1), micro_batch)
            return output.new_zeros(()), split_by_row(numbers, micro_batch)

        parts = self._run(shard, (), on_output, forward_only=True)
        if not self.parallel.is_output_rank:
            return None
        return {index: values for part in parts for index, values in part.items()}

    def _reduce(self, metrics: dict[str, float], names: Sequence[str]) -> dict[str, float]:
        """Combine metrics over data-parallel ranks and hand them to every pipeline stage."""
        sums = [name for name in names if not name.endswith(("_max", "_min"))]
        extremes = [name for name in names if name.endswith(("_max", "_min"))]
        unknown = set(metrics) - set(names)
        assert not unknown, f"objective reported undeclared metrics: {sorted(unknown)}"
        totals = torch.tensor([metrics.get(name, 0.0) for name in sums], dtype=torch.float64, device=self.device)
        signs = [-1.0 if name.endswith("_min") else 1.0 for name in extremes]
        tops = torch.tensor(
            [sign * metrics.get(name, -sign * np.inf) for sign, name in zip(signs, extremes, strict=True)],
            dtype=torch.float64,
            device=self.device,
        )
        if self.parallel.is_last_stage and self.parallel.dp_size > 1:
            dist.all_reduce(totals, group=self.parallel.dp_group)
            if extremes:
                dist.all_reduce(tops, op=dist.ReduceOp.MAX, group=self.parallel.dp_group)
        if self.parallel.pp_size > 1:
            both = torch.cat([totals, tops])
            dist.broadcast(both, src=self.parallel.last_stage_global_rank, group=self.parallel.pp_group)
            totals, tops = both[: len(sums)], both[len(sums) :]
        reduced = dict(zip(sums, totals.tolist(), strict=True))
        reduced.update((name, sign * top) for name, sign, top in zip(extremes, signs, tops.tolist(), strict=True))
        return reduced


def _packed_params(micro_batch: MicroBatch) -> PackedSeqParams | None:
    bounds = micro_batch.cu_seqlens
    if bounds is None:
        return None
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=micro_batch.max_seqlen,
        max_seqlen_kv=micro_batch.max_seqlen,
    )
