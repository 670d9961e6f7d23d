"""Largest difference between every estimator or loss and its definition in NumPy, over random batches.

Usage: python benchmarks/estimator_table.py [--batches 200] [--limit 1e-5]

The definitions are those of the tests, tests/unit/algorithms/references.py: loops over tokens, written from the papers
and independent of this project. Batches have observations, uneven groups and rows without a trainable token.
Differences are absolute where the number is under 1 and relative above. Exits with 1 where one exceeds the limit.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from miles.algorithms.advantages import compute_advantages_and_returns
from miles.algorithms.aggregation import LOSS_AGGREGATIONS, aggregate, loss_denominator, sequence_counts
from miles.algorithms.corrections import Correction, icepop, importance_weights, opsm_keep, tis
from miles.algorithms.kl import KL_KINDS, kl_estimate
from miles.algorithms.policy_losses import PolicyLoss
from miles.algorithms.value_losses import classification_value_loss, mse_value_loss

REFERENCES = Path(__file__).parents[1] / "tests" / "unit" / "algorithms" / "references.py"


def load_references() -> Any:
    spec = importlib.util.spec_from_file_location("algorithm_references", REFERENCES)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_batch(rng: np.random.Generator) -> dict[str, Any]:
    sizes = rng.integers(1, 5, size=3)
    sizes[0] = 2
    groups = rng.permutation(np.repeat(rng.permutation(50)[:3], sizes))
    lengths = rng.integers(1, 40, size=len(groups))
    masks = [(rng.random(n) < 0.8).astype(int) for n in lengths]
    masks[0][0] = 1
    batch: dict[str, Any] = {"rewards": rng.choice([0.0, 1.0, 0.4], size=len(groups)).tolist(), "loss_masks": masks}
    batch |= {"group_indices": groups.tolist()}
    for name in ("values", "kl", "advantages"):
        batch[name] = [rng.normal(size=n) for n in lengths]
    for name in ("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs"):
        batch[name] = [-3 * rng.random(n) - 1e-3 for n in lengths]
    return batch


def estimators(reference: Any, batch: dict[str, Any]) -> Iterator[tuple[str, str, Any, Any]]:
    """(what, reference, found rows, expected rows)."""
    masks, rewards, kl_coef, gamma = batch["loss_masks"], batch["rewards"], 0.1, 0.97
    penalties = [-kl_coef * kl for kl in batch["kl"]]
    rows = list(zip(penalties, batch["values"], masks, rewards, strict=True))

    def found(estimator: str, **options: Any) -> tuple[Any, Any]:
        return compute_advantages_and_returns(batch, estimator=estimator, **options)

    actor, critic = found("gae", gamma=gamma, lam=0.9, critic_lam=1.0, kl_coef=kl_coef)
    loops = [[reference.gae(p, v, m, gamma, lam, r) for p, v, m, r in rows] for lam in (0.9, 1.0)]
    yield "gae: advantages, KL penalty", "loop over tokens", actor, [a for a, _ in loops[0]]
    yield "gae: targets at their own lambda", "loop over tokens", critic, [r for _, r in loops[1]]
    for name, alpha in (("VAPO", 0.05), ("SAO", 1.5)):
        adaptive, _ = found("gae_adaptive", adaptive_alpha=alpha, critic_lam=1.0)
        expected = [
            reference.gae(np.zeros(len(m)), v, m, 1.0, reference.adaptive_lambda(m.sum(), alpha), r)[0]
            for _, v, m, r in rows
        ]
        yield f"gae_adaptive: {name}, alpha {alpha}", "loop over tokens", adaptive, expected
    to_go = [reference.reward_to_go(p, m, gamma, r) for p, _, m, r in rows]
    advantages, returns = found("monte_carlo", gamma=gamma, kl_coef=kl_coef)
    yield "monte_carlo: targets", "double loop", returns, to_go
    yield (
        "monte_carlo: minus values",
        "double loop",
        advantages,
        [np.where(m, g - v, 0) for g, v, m in zip(to_go, batch["values"], masks, strict=True)],
    )
    white, _ = found("reinforce_plus_plus", gamma=gamma, kl_coef=kl_coef)
    yield "reinforce_plus_plus", "double loop, whitened", white, reference.whiten_rows(to_go, masks)
    centred = reference.outcome_advantages("dr_grpo", rewards, batch["group_indices"])
    centred_to_go = [reference.reward_to_go(p, m, gamma, c) for p, m, c in zip(penalties, masks, centred, strict=True)]
    white, _ = found("reinforce_plus_plus_baseline", gamma=gamma, kl_coef=kl_coef)
    groups = batch["group_indices"]
    with_siblings = [mask * (groups.count(group) > 1) for group, mask in zip(groups, masks, strict=True)]
    expected = reference.whiten_rows(centred_to_go, with_siblings)
    yield "reinforce_plus_plus_baseline", "double loop, whitened", white, expected
    for name in ("grpo", "dr_grpo", "rloo"):
        totals = [r + (p * m).sum() for p, _, m, r in rows]
        expected = reference.outcome_advantages(name, totals, batch["group_indices"])
        advantages, _ = found(name, kl_coef=kl_coef)
        yield name, "loop over a trajectory's group", advantages, [a * m for a, m in zip(expected, masks, strict=True)]


def losses(reference: Any, batch: dict[str, Any]) -> Iterator[tuple[str, str, Any, Any]]:
    masks = batch["loss_masks"]
    lengths = [len(mask) for mask in masks]
    flat = {name: torch.tensor(np.concatenate(batch[name]), dtype=torch.float32) for name in batch if "log" in name}
    mask_T = torch.tensor(np.concatenate(masks))
    advantages_T = torch.tensor(np.concatenate(batch["advantages"]), dtype=torch.float32)
    where = {"row_T": torch.tensor(np.repeat(np.arange(len(lengths)), lengths)), "num_rows": len(lengths)}

    def rows(x_T: torch.Tensor) -> list[np.ndarray]:
        return np.split(x_T.detach().double().numpy(), np.cumsum(lengths)[:-1])

    def found(**settings: Any) -> list[np.ndarray]:
        loss_T, _ = PolicyLoss(**settings)(
            log_probs=flat["log_probs"],
            entropy=torch.zeros(len(mask_T)),
            advantages=advantages_T,
            loss_mask=mask_T,
            old_log_probs=flat["old_log_probs"],
            rollout_log_probs=flat["rollout_log_probs"],
            ref_log_probs=flat["ref_log_probs"],
            **where,
        )
        return rows(loss_T)

    def tokens(formula: Callable[..., float], base: str) -> list[list[float]]:
        columns = (batch["log_probs"], batch[base], batch["advantages"], masks)
        return [
            [formula(p, o, a) if m else 0.0 for p, o, a, m in zip(*row, strict=True)]
            for row in zip(*columns, strict=True)
        ]

    def ppo(p: float, o: float, a: float) -> float:
        return reference.clipped(math.exp(p - o), a, 0.2, 0.28)

    yield "ppo, clip .2 / .28", "one token", found(eps_clip_high=0.28), tokens(ppo, "old_log_probs")
    dual = tokens(lambda p, o, a: reference.clipped(math.exp(p - o), a, 0.2, 0.2, 1.5), "old_log_probs")
    yield "ppo, dual clip 1.5", "one token", found(dual_clip=1.5), dual
    expected = []
    for p, o, a, m in zip(batch["log_probs"], batch["old_log_probs"], batch["advantages"], masks, strict=True):
        ratio = reference.sequence_ratio(p, o, m)
        expected.append([reference.clipped(ratio, x, 0.2, 0.3) if k else 0.0 for x, k in zip(a, m, strict=True)])
    yield "gspo", "one sequence", found(objective="gspo", eps_clip=0.2, eps_clip_high=0.3), expected
    expected = tokens(lambda p, o, a: reference.cispo(p, o, a, 1.0, 2.0), "old_log_probs")
    yield "cispo", "one token", found(objective="cispo", eps_clip=1.0, eps_clip_high=2.0), expected
    for name, low, high in (("coding", 0.8, 3.0), ("reasoning", 0.3, 5.0)):
        expected = tokens(lambda p, o, a, low=low, high=high: reference.dis(p, o, a, low, high), "rollout_log_probs")
        yield f"sao_dis, {name}", "one token", found(objective="sao_dis", eps_clip=low, eps_clip_high=high), expected
    weights = reference.correction_weights(
        batch["old_log_probs"], batch["rollout_log_probs"], masks, level="token", mode="clip", low=0, high=math.inf
    )
    plain = tokens(lambda p, o, a: reference.clipped(math.exp(p - o), a, 0.2, 0.2), "old_log_probs")
    expected = [np.array(w) * np.array(x) for w, x in zip(weights, plain, strict=True)]
    yield "decoupled_ppo", "one token", found(objective="decoupled_ppo"), expected

    corrections: dict[str, tuple[Correction, tuple[str, str, float, float], Any, float | None]] = {
        "tis": (tis(), ("token", "clip", 0.0, 2.0), None, None),
        "icepop": (icepop(), ("token", "mask", 0.5, 5.0), None, None),
    }
    for level in ("token", "sequence", "geometric"):
        for mode in ("truncate", "clip", "mask"):
            made = Correction(level=level, mode=mode, reject_level="geometric", veto=0.08)
            corrections[f"mis {level} {mode}, rejection, veto"] = (
                made,
                (level, mode, 0.5, 2.0),
                ("geometric", 0.5, 2),
                0.08,
            )
    for name, (correction, (level, mode, low, high), reject, veto) in corrections.items():
        weight_T, _ = importance_weights(
            correction,
            old_log_probs=flat["old_log_probs"],
            rollout_log_probs=flat["rollout_log_probs"],
            loss_mask=mask_T,
            **where,
        )
        expected = reference.correction_weights(
            batch["old_log_probs"],
            batch["rollout_log_probs"],
            masks,
            level=level,
            mode=mode,
            low=low,
            high=high,
            reject=reject,
            veto=veto,
        )
        yield name, "loop over tokens", rows(weight_T), expected
    keep_T, _ = opsm_keep(
        log_probs=flat["log_probs"],
        old_log_probs=flat["old_log_probs"],
        advantages=advantages_T,
        loss_mask=mask_T,
        delta=1e-4,
        **where,
    )
    kept = reference.opsm_kept(batch["log_probs"], batch["old_log_probs"], batch["advantages"], masks, 1e-4)
    yield "opsm", "loop over tokens", rows(keep_T), kept
    for kind in KL_KINDS:
        kl_T = kl_estimate(
            log_probs=flat["log_probs"],
            ref_log_probs=flat["ref_log_probs"],
            loss_mask=mask_T,
            kind=kind,
            behaviour_log_probs=flat["rollout_log_probs"],
        )
        expected = [
            [reference.kl(kind, p, r, b) if m else 0.0 for p, r, b, m in zip(*row, strict=True)]
            for row in zip(batch["log_probs"], batch["ref_log_probs"], batch["rollout_log_probs"], masks, strict=True)
        ]
        yield f"KL {kind}", "one token", rows(kl_T), expected
    sequence_tokens, num_sequences, num_tokens = sequence_counts(masks)
    for mode in LOSS_AGGREGATIONS:
        total = aggregate(
            torch.tensor(np.concatenate(batch["advantages"])),
            loss_mask_T=mask_T,
            mode=mode,
            row_T=where["row_T"],
            sequence_tokens_B=torch.tensor(sequence_tokens),
        )
        denominator = loss_denominator(mode, num_tokens=num_tokens, num_sequences=num_sequences, constant=40)
        expected = reference.aggregate(mode, batch["advantages"], masks, 40)
        yield f"aggregation {mode}", "loop over sequences", [[float(total) / denominator]], [[expected]]


def value_losses(reference: Any, batch: dict[str, Any]) -> Iterator[tuple[str, str, Any, Any]]:
    bins, low, high = 21, -1.0, 2.0
    rng = np.random.default_rng(int(abs(batch["values"][0][0]) * 1e9))
    returns, values, old = (rng.uniform(low, high, size=30) for _ in range(3))
    logits = rng.normal(size=(30, bins))
    mask_T = torch.tensor(rng.integers(0, 2, size=30))

    def masked(numbers: list[float]) -> list[list[float]]:
        return [[x if m else 0.0 for x, m in zip(numbers, mask_T.tolist(), strict=True)]]

    def tensor(x: np.ndarray) -> torch.Tensor:
        return torch.tensor(x, dtype=torch.float32)

    for clip in (None, 0.2):
        loss_T, _ = mse_value_loss(
            values=tensor(values),
            returns=tensor(returns),
            loss_mask=mask_T,
            old_values=None if clip is None else tensor(old),
            value_clip=clip,
        )
        expected = [
            reference.value_mse(v, r, None if clip is None else o, clip)
            for v, r, o in zip(values, returns, old, strict=True)
        ]
        yield f"value mse{'' if clip is None else ', clip .2'}", "one token", [loss_T.numpy()], masked(expected)
    for target_type in ("two_hot", "hl_gauss"):
        loss_T, _ = classification_value_loss(
            logits_TB=tensor(logits),
            returns_T=tensor(returns),
            loss_mask_T=mask_T,
            reward_range=[low, high],
            target_type=target_type,
        )
        targets = [
            reference.two_hot(r, bins, low, high)
            if target_type == "two_hot"
            else reference.hl_gauss(r, bins, low, high, 0.75)
            for r in returns
        ]
        expected = [reference.cross_entropy(x, t) for x, t in zip(logits, targets, strict=True)]
        yield f"value {target_type}", "one token", [loss_T.numpy()], masked(expected)


def largest_difference(found: Any, expected: Any) -> float:
    found_A = np.concatenate([np.asarray(row, dtype=np.float64) for row in found])
    expected_A = np.concatenate([np.asarray(row, dtype=np.float64) for row in expected])
    return float((np.abs(found_A - expected_A) / np.maximum(np.abs(expected_A), 1.0)).max(initial=0.0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--limit", type=float, default=1e-5)
    args = parser.parse_args()
    reference = load_references()
    differences: dict[tuple[str, str], float] = {}
    for seed in range(args.batches):
        batch = make_batch(np.random.default_rng(seed))
        for part in (estimators, losses, value_losses):
            for what, against, found, expected in part(reference, batch):
                key = (what, against)
                differences[key] = max(differences.get(key, 0.0), largest_difference(found, expected))
    print(f"{args.batches} random batches\n{'what':<44}{'definition':<32}{'largest difference':>18}")
    for (what, against), difference in differences.items():
        print(f"{what:<44}{against:<32}{difference:>18.1e}")
    return 0 if max(differences.values()) <= args.limit else 1


if __name__ == "__main__":
    sys.exit(main())
