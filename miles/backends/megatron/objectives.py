"""What is optimised: value regression or classification, the policy's loss, log-likelihood. Pure functions of tensors,
except that token log-probabilities are summed over the tensor-parallel group and tokens joined over the
context-parallel one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from miles.algorithms.aggregation import aggregate, loss_denominator, masked_sum
from miles.algorithms.policy_losses import PolicyLoss
from miles.algorithms.value_losses import (
    EV_STATS,
    classification_value_loss,
    explained_variance_stats,
    mse_value_loss,
    value_from_logits,
)
from miles.backends.megatron.micro_batch import MicroBatch
from miles.backends.megatron.parallel import ParallelState
from miles.backends.megatron.policy import constant_length, policy_loss_of
from miles.backends.megatron.vocab_parallel import gather_columns, token_log_probs

Result = tuple[torch.Tensor, dict[str, Any]]


class TokenMean:
    """The loss is a mean over the trainable tokens of the whole batch."""

    def denominator(self, global_counts: Mapping[str, int]) -> float:
        return global_counts["tokens"]


@dataclass(frozen=True)
class ValueObjective(TokenMean):
    """Value loss on given returns; see miles.algorithms.value_losses for the formulas."""

    loss_type: str
    reward_range: tuple[float, float]
    target_type: str
    sigma_ratio: float
    value_clip: float
    clipped: bool
    """Whether the batch carries old values, which the mse loss then clips around."""

    @classmethod
    def from_args(cls, args: Any, *, clipped: bool) -> ValueObjective:
        return cls(
            loss_type=args.value_loss_type,
            reward_range=tuple(args.value_reward_range),
            target_type=args.value_target_type,
            sigma_ratio=args.hl_gauss_sigma_ratio,
            value_clip=args.value_clip,
            clipped=clipped and args.value_loss_type == "mse",
        )

    @property
    def columns(self) -> tuple[str, ...]:
        return ("returns", "values") if self.clipped else ("returns",)

    @property
    def metric_names(self) -> tuple[str, ...]:
        own = (
            ("value_clipped",) if self.loss_type == "mse" else ("value_accuracy", "value_entropy", "value_confidence")
        )
        return ("tokens", "value_loss", *own, *EV_STATS)

    def read(self, outputs: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
        """Values [T]."""
        return self._values(micro_batch.predictions(outputs))

    def _values(self, outputs_TB: torch.Tensor) -> torch.Tensor:
        return value_from_logits(logits_TB=outputs_TB, loss_type=self.loss_type, reward_range=self.reward_range)

    def __call__(self, outputs: torch.Tensor, micro_batch: MicroBatch) -> Result:
        returns_T, mask_T = micro_batch.columns["returns"], micro_batch.mask_T
        outputs_TB = micro_batch.predictions(outputs)
        values_T = self._values(outputs_TB)
        if self.loss_type == "mse":
            loss_T, metrics = mse_value_loss(
                values=values_T,
                returns=returns_T,
                loss_mask=mask_T,
                old_values=micro_batch.columns["values"] if self.clipped else None,
                value_clip=self.value_clip if self.clipped else None,
            )
        else:
            loss_T, metrics = classification_value_loss(
                logits_TB=outputs_TB,
                returns_T=returns_T,
                loss_mask_T=mask_T,
                reward_range=self.reward_range,
                target_type=self.target_type,
                sigma_ratio=self.sigma_ratio,
            )
        stats = explained_variance_stats(values=values_T, returns=returns_T, loss_mask=mask_T)
        return masked_sum(loss_T, mask=mask_T), {**metrics, **stats}


@dataclass(frozen=True)
class TokenReader:
    """Token log-probabilities from vocabulary-parallel logits.

    `temperature` divides the logits, as sampling did; 1 for likelihoods.
    """

    vocab_size: int
    tp_rank: int
    tp_group: dist.ProcessGroup | None
    temperature: float = 1.0

    @classmethod
    def build(cls, parallel: ParallelState, *, vocab_size: int, temperature: float = 1.0) -> TokenReader:
        group = parallel.tp_group if parallel.tp_size > 1 else None
        return cls(vocab_size=vocab_size, tp_rank=parallel.tp_rank, tp_group=group, temperature=temperature)

    def __call__(
        self, outputs: torch.Tensor, micro_batch: MicroBatch, *, with_entropy: bool = False, training: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies (zero unless asked for), both [T]; in training the logits are used up."""
        log_probs, entropy = token_log_probs(
            outputs,
            micro_batch.targets_L,
            vocab_size=self.vocab_size,
            rank=self.tp_rank,
            group=self.tp_group,
            with_entropy=with_entropy,
            temperature=self.temperature,
            positions_T=micro_batch.positions_L,
            reuse_logits=training,
        )
        if not with_entropy:
            return micro_batch.whole(log_probs), torch.zeros_like(micro_batch.mask_T, dtype=torch.float32)
        both_T2 = micro_batch.whole(torch.stack((log_probs, entropy), dim=1))
        return both_T2[:, 0], both_T2[:, 1]

    def read(self, outputs: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
        """Log-probabilities [T]."""
        return self(outputs, micro_batch)[0]

    def logits(self, outputs: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
        """Logits [T, vocabulary] of all tensor-parallel ranks, without the vocabulary's padding."""
        columns = gather_columns(micro_batch.predictions(outputs), group=self.tp_group)
        return columns[:, : self.vocab_size]


@dataclass(frozen=True)
class PolicyObjective:
    """The actor's loss, see miles.algorithms.policy_losses, aggregated over the whole batch."""

    reader: TokenReader
    loss: PolicyLoss
    aggregation: str
    constant_length: float | None
    """Only for the aggregation "seq-mean-token-sum-norm"."""
    own_old_log_probs: bool
    """The batch carries no old log-probabilities: they are those of this very forward pass (one step per batch)."""
    correction_weight_mean: float | None = None
    measure_engine: bool = False
    """The batch carries the engine's log-probabilities: report how far this forward pass is from them."""

    @classmethod
    def from_args(cls, args: Any, shard: Mapping[str, Any], *, reader: TokenReader) -> PolicyObjective:
        return cls(
            reader=reader,
            loss=policy_loss_of(args),
            aggregation=args.loss_agg_mode,
            constant_length=constant_length(args),
            own_old_log_probs="old_log_probs" not in shard,
            correction_weight_mean=shard["global_counts"].get("correction_weight_mean"),
            measure_engine="rollout_log_probs" in shard,
        )

    @property
    def columns(self) -> tuple[str, ...]:
        own = {"old_log_probs"} if self.own_old_log_probs else set()
        measured = ("rollout_log_probs",) if self.measure_engine else ()
        return tuple(dict.fromkeys((*(name for name in self.loss.columns if name not in own), *measured)))

    @property
    def metric_names(self) -> tuple[str, ...]:
        return (*self.loss.metric_names, *(("log_prob_difference",) if self.measure_engine else ()))

    def denominator(self, global_counts: Mapping[str, int]) -> float:
        return loss_denominator(
            self.aggregation,
            num_tokens=global_counts["tokens"],
            num_sequences=global_counts["sequences"],
            constant=self.constant_length,
        )

    def __call__(self, outputs: torch.Tensor, micro_batch: MicroBatch) -> Result:
        mask_T, row_T = micro_batch.mask_T, micro_batch.row_T
        log_probs_T, entropy_T = self.reader(outputs, micro_batch, with_entropy=True, training=True)
        columns = {name: micro_batch.columns[name] for name in self.columns if name in self.loss.columns}
        if self.own_old_log_probs and "old_log_probs" in self.loss.columns:
            columns["old_log_probs"] = log_probs_T.detach()
        loss_T, metrics = self.loss(
            log_probs=log_probs_T,
            entropy=entropy_T,
            loss_mask=mask_T,
            row_T=row_T,
            num_rows=len(micro_batch.sample_indices),
            correction_weight_mean=self.correction_weight_mean,
            **columns,
        )
        total = aggregate(
            loss_T,
            loss_mask_T=mask_T,
            mode=self.aggregation,
            row_T=row_T,
            sequence_tokens_B=micro_batch.sequence_tokens_B,
        )
        if self.measure_engine:
            difference_T = log_probs_T.detach() - micro_batch.columns["rollout_log_probs"]
            metrics["log_prob_difference"] = masked_sum(difference_T.abs().double(), mask=mask_T)
        return total, metrics


@dataclass(frozen=True)
class LikelihoodObjective(TokenMean):
    """Negative log-likelihood of the response tokens (supervised warm start)."""

    reader: TokenReader

    columns = ()
    metric_names = ("tokens", "sft_loss")

    def __call__(self, outputs: torch.Tensor, micro_batch: MicroBatch) -> Result:
        mask_T = micro_batch.mask_T
        log_probs_T, _ = self.reader(outputs, micro_batch, training=True)
        loss = masked_sum(-log_probs_T, mask=mask_T)
        return loss, {"tokens": mask_T.sum().double(), "sft_loss": loss.detach().double()}
