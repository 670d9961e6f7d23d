"""What is optimised: value regression or classification, PPO's policy loss, log-likelihood. Pure functions of tensors,
except that token log-probabilities are summed over the tensor-parallel group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from miles.algorithms.aggregation import masked, masked_sum
from miles.algorithms.policy_losses import ppo_clip
from miles.algorithms.value_losses import (
    EV_STATS,
    classification_value_loss,
    explained_variance_stats,
    mse_value_loss,
    value_from_logits,
)
from miles.backends.megatron.micro_batch import MicroBatch
from miles.backends.megatron.parallel import ParallelState
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
        return self._values(micro_batch.whole(outputs))

    def _values(self, outputs_TB: torch.Tensor) -> torch.Tensor:
        return value_from_logits(logits_TB=outputs_TB, loss_type=self.loss_type, reward_range=self.reward_range)

    def __call__(self, outputs: torch.Tensor, micro_batch: MicroBatch) -> Result:
        returns_T, mask_T = micro_batch.columns["returns"], micro_batch.mask_T
        outputs_TB = micro_batch.whole(outputs)
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
        return masked_sum(loss_T, mask_T), {**metrics, **stats}


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
        self, outputs: torch.Tensor, micro_batch: MicroBatch, with_entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = outputs if self.temperature == 1.0 else outputs.float() / self.temperature
        log_probs, entropy = token_log_probs(
            logits,
            micro_batch.targets_L,
            vocab_size=self.vocab_size,
            rank=self.tp_rank,
            group=self.tp_group,
            with_entropy=with_entropy,
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
        columns = gather_columns(outputs, group=self.tp_group)
        return micro_batch.whole(columns[:, : self.vocab_size])


@dataclass(frozen=True)
class PolicyObjective(TokenMean):
    """PPO's clipped surrogate minus `entropy_coef` times the entropy."""

    reader: TokenReader
    eps_clip: float
    eps_clip_high: float
    entropy_coef: float

    columns = ("advantages", "old_log_probs")
    metric_names = ("tokens", "policy_loss", "entropy", "clipped", "approx_kl", "ratio_max", "ratio_min")

    def __call__(self, outputs: torch.Tensor, micro_batch: MicroBatch) -> Result:
        mask_T = micro_batch.mask_T
        log_probs_T, entropy_T = self.reader(outputs, micro_batch, with_entropy=True)
        loss_T, metrics = ppo_clip(
            log_probs=log_probs_T,
            old_log_probs=micro_batch.columns["old_log_probs"],
            advantages=micro_batch.columns["advantages"],
            loss_mask=mask_T,
            eps_clip=self.eps_clip,
            eps_clip_high=self.eps_clip_high,
        )
        policy_loss = masked_sum(loss_T, mask_T)
        entropy = masked_sum(entropy_T if self.entropy_coef else entropy_T.detach(), mask_T)
        loss = policy_loss - self.entropy_coef * entropy if self.entropy_coef else policy_loss
        sums = {"policy_loss": policy_loss.detach().double(), "entropy": entropy.detach().double()}
        return loss, {**metrics, **sums}


@dataclass(frozen=True)
class LikelihoodObjective(TokenMean):
    """Negative log-likelihood of the response tokens (supervised warm start)."""

    reader: TokenReader

    columns = ()
    metric_names = ("tokens", "sft_loss")

    def __call__(self, outputs: torch.Tensor, micro_batch: MicroBatch) -> Result:
        mask_T = micro_batch.mask_T
        loss = masked(-self.reader.read(outputs, micro_batch), mask_T).sum()
        return loss, {"tokens": mask_T.sum().double(), "sft_loss": loss.detach().double()}
