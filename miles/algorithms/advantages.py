"""Advantages for the actor and value targets for the critic, over the whole batch of a rollout, on the driver.

Invariants: only trainable tokens exist here (observations are stepped over and cost no discount); a trajectory's
reward counts once in its group, however many rows it has; groups are told apart by their id, never by position;
everything is accumulated in float64; nothing depends on the order of rows.

An estimator is a function `estimator(batch, options) -> (advantages_A, returns_A)` of an `AdvantageBatch` and
`AdvantageOptions`, both float arrays over the batch's trainable tokens. One's own needs no more than this:

    def reward_itself(batch, options):
        advantages_A = batch.rewards_N[batch.row_A]
        return advantages_A, advantages_A

Suffixes: N rows, M trajectories, A trainable tokens of all rows, in row order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from miles.algorithms.aggregation import TRAJECTORY_COLUMNS
from miles.algorithms.gae import adaptive_lambda, check_decay, discounted_row_sums, gae_rows, put, row_ends
from miles.algorithms.whitening import whiten


@dataclass(frozen=True, kw_only=True)
class AdvantageOptions:
    """Settings of an estimator; which of them each reads is in `miles.config.choices`.

    Raises:
        ValueError: gamma or a lambda outside [0, 1], a negative or non-finite `kl_coef`, an unknown mode.
    """

    gamma: float = 1.0
    lam: float = 1.0
    """Lambda of the actor's advantages."""
    critic_lam: float | None = None
    """Lambda of the critic's targets; None takes `lam`."""
    kl_coef: float = 0.0
    """Per-token penalty -kl_coef * kl in the reward, from the batch's column `kl`; the same for actor and critic."""
    adaptive_mode: str = "adaptive"
    """gae_adaptive: "adaptive" takes the actor's lambda from the trajectory's length, "fixed" takes `lam`."""
    adaptive_alpha: float = 1.5
    adaptive_min_length: int = 1

    def __post_init__(self) -> None:
        check_decay("gamma", self.gamma)
        check_decay("lambda", self.lam)
        check_decay("the critic's lambda", self.critic_lambda)
        if not 0.0 <= self.kl_coef < float("inf"):
            raise ValueError(f"kl_coef must be a finite number of at least 0, got {self.kl_coef}")
        if self.adaptive_mode not in ("adaptive", "fixed"):
            raise ValueError(f"adaptive_mode must be 'adaptive' or 'fixed', got {self.adaptive_mode!r}")

    @property
    def critic_lambda(self) -> float:
        return self.lam if self.critic_lam is None else self.critic_lam


class AdvantageBatch:
    """A column batch seen through its trainable tokens. Columns are checked when they are first asked for.

    Columns (one entry per row): `loss_masks`; `rewards`, the trajectory's reward; `values` and `kl`, per response
    token; `group_indices`, which prompt a row answers; `trajectory_ids`, equal for rows of one trajectory (each row is
    one of its own without the column); `sample_indices`, to name rows in errors. With compaction also
    `compaction_trajectory_ids`, `compaction_subsequent_active_tokens`, `compaction_trajectory_active_tokens`.
    """

    def __init__(self, columns: Mapping[str, Any], *, kl_coef: float = 0.0) -> None:
        self._columns = columns
        self._kl_coef = kl_coef
        masks = [np.asarray(mask) for mask in self._column("loss_masks")]
        self.num_rows = len(masks)
        self.lengths_N = np.array([mask.size for mask in masks], dtype=np.int64)
        flat = np.concatenate(masks).astype(bool) if masks else np.zeros(0, dtype=bool)
        self._place_A = np.flatnonzero(flat)
        bounds = np.searchsorted(self._place_A, np.append(0, np.cumsum(self.lengths_N)))
        self.counts_N = np.diff(bounds)
        """Trainable tokens of each row."""

    @cached_property
    def row_A(self) -> np.ndarray:
        """Row of each trainable token."""
        return np.repeat(np.arange(self.num_rows), self.counts_N)

    def _column(self, name: str) -> Any:
        if name not in self._columns:
            raise ValueError(f"the batch has no column {name}, which the advantage estimator needs")
        return self._columns[name]

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def name(self, row: int) -> str:
        """How errors call a row."""
        indices = self._columns.get("sample_indices")
        return f"row {row}" if indices is None else f"row {row} (sample {indices[row]})"

    def per_token(self, name: str) -> np.ndarray:
        """Column `name` on trainable tokens, float64 [A].

        Raises:
            ValueError: no such column, a length that is not the response's, a non-finite number on a trainable token.
        """
        rows = [np.asarray(numbers) for numbers in self._column(name)]
        if len(rows) != self.num_rows:
            raise ValueError(f"column {name} has {len(rows)} rows, loss_masks has {self.num_rows}")
        for row, numbers in enumerate(rows):
            if numbers.shape != (self.lengths_N[row],):
                raise ValueError(
                    f"{name} of {self.name(row)}: shape {numbers.shape} for {self.lengths_N[row]} response tokens"
                )
        x_A = np.concatenate(rows)[self._place_A].astype(np.float64) if rows else np.zeros(0)
        finite_A = np.isfinite(x_A)
        if not finite_A.all():
            raise ValueError(f"{name} of {self.name(self.row_A[np.argmin(finite_A)])}: not finite on trainable tokens")
        return x_A

    def per_row(self, name: str) -> np.ndarray:
        """Column `name`, float64 [N].

        Raises:
            ValueError: no such column, a wrong number of entries, an entry that is no finite number (None: an aborted
                or unscored sample that should have been dropped), naming the sample.
        """
        entries = self._column(name)
        if len(entries) != self.num_rows:
            raise ValueError(f"column {name} has {len(entries)} rows, loss_masks has {self.num_rows}")
        for row, entry in enumerate(entries):
            if not isinstance(entry, (int, float, np.number)) or not np.isfinite(entry):
                raise ValueError(f"{name} of {self.name(row)} is {entry!r}, expected a finite number")
        return np.array([float(entry) for entry in entries], dtype=np.float64)

    @cached_property
    def rewards_N(self) -> np.ndarray:
        """Reward of each row's trajectory.

        Raises:
            ValueError: as `per_row`.
        """
        return self.per_row("rewards")

    @cached_property
    def values_A(self) -> np.ndarray:
        """The critic's values."""
        return self.per_token("values")

    @cached_property
    def penalty_A(self) -> np.ndarray:
        """kl_coef * kl, zeros without a penalty.

        Raises:
            ValueError: with compaction, where what a later segment pays would not reach earlier ones.
        """
        if self._kl_coef == 0.0:
            return np.zeros(len(self._place_A))
        if self.has_compaction:
            raise ValueError("kl_coef must be 0 with compaction (arXiv 2607.05378 trains without a KL penalty)")
        return self._kl_coef * self.per_token("kl")

    def token_rewards(self, terminal_N: np.ndarray) -> np.ndarray:
        """-kl_coef * kl on every trainable token, plus `terminal_N` on each row's last one, [A]."""
        reward_A = -self.penalty_A
        reward_A[row_ends(self.counts_N)] += terminal_N[self.counts_N > 0]
        return reward_A

    # ---------------------------------------------------------------- compaction

    @property
    def has_compaction(self) -> bool:
        return "compaction_trajectory_ids" in self

    def later_factor(self, decay_N: float | np.ndarray) -> np.ndarray:
        """decay ** (trainable tokens in later segments of the trajectory), [N]; ones without compaction."""
        if not self.has_compaction:
            return np.ones(self.num_rows)
        return np.power(decay_N, self.per_row("compaction_subsequent_active_tokens"))

    @cached_property
    def trajectory_counts_N(self) -> np.ndarray:
        """Trainable tokens that the length-adaptive lambda counts: the row's, with compaction the trajectory's."""
        if not self.has_compaction:
            return self.counts_N
        return self.per_row("compaction_trajectory_active_tokens")

    # ---------------------------------------------------------------- trajectories and groups

    @cached_property
    def trajectory_N(self) -> np.ndarray:
        """Number of each row's trajectory, 0 to M - 1."""
        for name in TRAJECTORY_COLUMNS:
            if name in self:
                return _numbered(self._column(name))
        return np.arange(self.num_rows)

    def of_trajectories(self, x_N: np.ndarray, what: str) -> np.ndarray:
        """One entry per trajectory, [M].

        Raises:
            ValueError: rows of one trajectory disagree, naming them.
        """
        _, first_M = np.unique(self.trajectory_N, return_index=True)
        differs_N = x_N != x_N[first_M][self.trajectory_N]
        if differs_N.any():
            row = int(np.argmax(differs_N))
            first = int(first_M[self.trajectory_N[row]])
            raise ValueError(
                f"{self.name(first)} and {self.name(row)} belong to one trajectory, but differ in {what}:"
                f" {x_N[first]} and {x_N[row]}"
            )
        return x_N[first_M]

    @cached_property
    def group_M(self) -> np.ndarray:
        """Number of each trajectory's group."""
        return self.of_trajectories(_numbered(self._column("group_indices")), "group")

    def grouped_rewards(self) -> "GroupedRewards":
        """Rewards of trajectories, each with the KL penalty of all its tokens, and the statistics of their groups."""
        reward_M = self.of_trajectories(self.rewards_N, "reward")
        penalty_M = np.bincount(self.trajectory_N[self.row_A], weights=self.penalty_A, minlength=len(reward_M))
        return GroupedRewards(reward_M - penalty_M, self.group_M)

    def on_tokens(self, x_M: np.ndarray) -> np.ndarray:
        """A number of each trajectory on all of its trainable tokens, [A]."""
        return x_M[self.trajectory_N[self.row_A]]

    def monte_carlo(self, terminal_N: np.ndarray, gamma: float) -> np.ndarray:
        """Discounted reward to go at every trainable token, [A]: what a critic is asked to predict without lambda."""
        terminal_N = terminal_N * self.later_factor(gamma)
        return discounted_row_sums(self.token_rewards(terminal_N), counts_N=self.counts_N, decay=gamma)

    def split(self, x_A: np.ndarray) -> list[np.ndarray]:
        """Per row a float32 array of response_length numbers, 0 outside the mask."""
        flat = np.empty(int(self.lengths_N.sum()), dtype=np.float32)
        put(x_A, self._place_A, into=flat)
        ends = np.cumsum(self.lengths_N).tolist()
        # np.split takes four times as long for thousands of rows.
        return [flat[end - length : end] for end, length in zip(ends, self.lengths_N.tolist(), strict=True)]


class GroupedRewards:
    """Rewards of trajectories with what their group says about them; all arrays are [M]."""

    def __init__(self, reward_M: np.ndarray, group_M: np.ndarray) -> None:
        self.reward_M = reward_M
        size_G = np.bincount(group_M)
        mean_M = (np.bincount(group_M, weights=reward_M) / size_G)[group_M]
        self.size_M = size_G[group_M]
        self.centred_M = np.where(self.size_M > 1, reward_M - mean_M, 0.0)
        """Reward minus the group's mean; exactly 0 in a group of one."""
        squares_G = np.bincount(group_M, weights=self.centred_M**2)
        self.std_M = np.sqrt(squares_G / np.maximum(size_G - 1, 1))[group_M]
        """Standard deviation with n - 1; 0 in a group of one."""

    def require_siblings(self, estimator: str) -> None:
        """Raise ValueError where no group has two members: nothing would be learned."""
        if (self.size_M < 2).all():
            raise ValueError(
                f"{estimator} compares the trajectories of one prompt, but every group has one: sample each prompt"
                " more than once"
            )


def _numbered(labels: Sequence[Any]) -> np.ndarray:
    """0, 1, ... for equal labels, in order of first appearance."""
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(label, len(numbers)) for label in labels], dtype=np.int64)


# -------------------------------------------------------------------- registry

EstimatorFunction = Callable[[AdvantageBatch, AdvantageOptions], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True, kw_only=True)
class AdvantageEstimator:
    name: str
    function: EstimatorFunction
    needs_values: bool = False
    """Whether it reads the column `values`, so that the run needs a critic."""
    needs_groups: bool = False
    """Whether it compares trajectories of one prompt (column `group_indices`)."""


ADVANTAGE_ESTIMATORS: dict[str, AdvantageEstimator] = {}


def _place(function: EstimatorFunction) -> str:
    # A callable object has no name of its own.
    return f"{function.__module__}:{getattr(function, '__qualname__', type(function).__qualname__)}"


def register_advantage_estimator(
    name: str, *, needs_values: bool = False, needs_groups: bool = False
) -> Callable[[EstimatorFunction], EstimatorFunction]:
    """Decorator that gives an estimator its name; the function itself stays as it is.

    Args:
        needs_values, needs_groups: see `AdvantageEstimator`.

    Raises:
        ValueError: another function has the name.
    """

    def register(function: EstimatorFunction) -> EstimatorFunction:
        known = ADVANTAGE_ESTIMATORS.get(name)
        # a file loaded a second time brings its functions anew
        if known is not None and _place(known.function) != _place(function):
            raise ValueError(f"there is already an advantage estimator {name!r}")
        ADVANTAGE_ESTIMATORS[name] = AdvantageEstimator(
            name=name, function=function, needs_values=needs_values, needs_groups=needs_groups
        )
        return function

    return register


def resolve_advantage_estimator(estimator: str | EstimatorFunction) -> AdvantageEstimator:
    """The estimator of a name, or of a function that the caller loaded from a path like FILE.py:FUNCTION.

    A function that was not registered counts as one that needs neither values nor groups.

    Raises:
        ValueError: unknown name; the line lists the known ones.
    """
    if not isinstance(estimator, str):
        for known in ADVANTAGE_ESTIMATORS.values():
            if known.function is estimator:
                return known
        return AdvantageEstimator(name=_place(estimator), function=estimator)
    if estimator not in ADVANTAGE_ESTIMATORS:
        raise ValueError(
            f"unknown advantage estimator {estimator!r}, expected FILE.py:FUNCTION, MODULE:FUNCTION or one of"
            f" {', '.join(sorted(ADVANTAGE_ESTIMATORS))}"
        )
    return ADVANTAGE_ESTIMATORS[estimator]


def compute_advantages_and_returns(
    batch: Mapping[str, Any],
    *,
    estimator: str | EstimatorFunction,
    gamma: float = 1.0,
    lam: float = 1.0,
    critic_lam: float | None = None,
    normalize: bool = False,
    kl_coef: float = 0.0,
    adaptive_mode: str = "adaptive",
    adaptive_alpha: float = 1.5,
    adaptive_min_length: int = 1,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Advantages for the actor and value targets for the critic, for every row of a column batch.

    Args:
        batch: the whole rollout's columns, see `AdvantageBatch`; never one rank's share.
        estimator: a registered name or a function, see `resolve_advantage_estimator`.
        normalize: whiten the advantages over all trainable tokens of the batch; targets are never whitened.
        gamma and the rest: see `AdvantageOptions`.

    Returns:
        (advantages, returns): per row a float32 array of response_length numbers, 0 outside the mask.

    Raises:
        ValueError: unknown estimator or bad option; a column missing or of a wrong shape; a reward of None, or a
            non-finite number under the mask, naming row and sample; a result that is not two arrays over the
            trainable tokens, or not finite.
    """
    options = AdvantageOptions(
        gamma=gamma,
        lam=lam,
        critic_lam=critic_lam,
        kl_coef=kl_coef,
        adaptive_mode=adaptive_mode,
        adaptive_alpha=adaptive_alpha,
        adaptive_min_length=adaptive_min_length,
    )
    rows = AdvantageBatch(batch, kl_coef=kl_coef)
    results = resolve_advantage_estimator(estimator).function(rows, options)
    if not isinstance(results, tuple) or len(results) != 2:
        raise ValueError("an advantage estimator must return (advantages, returns)")
    advantages_A, returns_A = (
        _checked(result, rows, f"{what} of the advantage estimator")
        for what, result in zip(("advantages", "returns"), results, strict=True)
    )
    if normalize:
        advantages_A = _whiten(advantages_A)
    return rows.split(advantages_A), rows.split(returns_A)


def _checked(result: Any, rows: AdvantageBatch, what: str) -> np.ndarray:
    """What an estimator returned, float64 [A]; ValueError unless these are numbers that float32 holds."""
    if np.iscomplexobj(result):
        raise ValueError(f"{what} are complex numbers")
    try:
        x_A = np.asarray(result, dtype=np.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        # A tensor that requires a gradient is the last kind.
        raise ValueError(f"{what} are not numbers: {error}") from None
    if x_A.shape != rows.row_A.shape:
        raise ValueError(
            f"{what} have shape {x_A.shape}, expected one number for each of the {len(rows.row_A)} trainable tokens"
        )
    finite_A = np.abs(x_A) <= np.finfo(np.float32).max
    if not finite_A.all():
        raise ValueError(f"{what} are not finite at {rows.name(rows.row_A[np.argmin(finite_A)])}")
    return x_A


# -------------------------------------------------------------------- estimators


def _whiten(x_A: np.ndarray, *, only_A: np.ndarray | None = None) -> np.ndarray:
    """`x_A` whitened, over those of `only_A` where it is given; the others become 0."""
    x = torch.as_tensor(x_A, dtype=torch.float64)
    return whiten(x, mask=torch.ones_like(x) if only_A is None else torch.from_numpy(only_A)).numpy()


def _gae(batch: AdvantageBatch, options: AdvantageOptions, lam_N: float | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    reward_A = batch.token_rewards(batch.rewards_N)

    def advantages(lam: float | np.ndarray) -> np.ndarray:
        local_A = gae_rows(
            rewards_A=reward_A, values_A=batch.values_A, counts_N=batch.counts_N, gamma=options.gamma, lam=lam
        )
        if not batch.has_compaction:
            return local_A
        # arXiv 2607.05378, Eq. 14: no bootstrap over a compaction, only the decay of what comes after
        return local_A * batch.later_factor(options.gamma * lam)[batch.row_A]

    actor_A = advantages(lam_N)
    same = np.ndim(lam_N) == 0 and lam_N == options.critic_lambda
    critic_A = actor_A if same else advantages(options.critic_lambda)
    return actor_A, critic_A + batch.values_A


@register_advantage_estimator("gae", needs_values=True)
def estimate_gae(batch: AdvantageBatch, options: AdvantageOptions) -> tuple[np.ndarray, np.ndarray]:
    """GAE (arXiv 1506.02438), the reward on the last trainable token; actor and critic with lambdas of their own.

    With compaction the advantage of a segment is multiplied by (gamma lambda) ** (tokens of later segments).
    """
    return _gae(batch, options, options.lam)


@register_advantage_estimator("gae_adaptive", needs_values=True)
def estimate_gae_adaptive(batch: AdvantageBatch, options: AdvantageOptions) -> tuple[np.ndarray, np.ndarray]:
    """GAE whose actor's lambda depends on the trajectory's length (`adaptive_lambda`); the critic's stays fixed."""
    if options.adaptive_mode == "fixed":
        return _gae(batch, options, options.lam)
    lam_N = adaptive_lambda(
        batch.trajectory_counts_N.tolist(), alpha=options.adaptive_alpha, min_length=options.adaptive_min_length
    )
    return _gae(batch, options, lam_N.numpy())


@register_advantage_estimator("monte_carlo")
def estimate_monte_carlo(batch: AdvantageBatch, options: AdvantageOptions) -> tuple[np.ndarray, np.ndarray]:
    """Discounted reward to go, minus the critic's value where the batch has one: then it is GAE with lambda 1, but for
    segments of a compacted trajectory with gamma below 1, where GAE decays the value too.
    """
    return_A = batch.monte_carlo(batch.rewards_N, options.gamma)
    return (return_A - batch.values_A if "values" in batch else return_A), return_A


def _outcome(
    batch: AdvantageBatch, options: AdvantageOptions, advantage_M: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """A trajectory's one advantage on all its tokens; Monte-Carlo targets should there be a critic."""
    return batch.on_tokens(advantage_M), batch.monte_carlo(batch.rewards_N, options.gamma)


@register_advantage_estimator("grpo", needs_groups=True)
def estimate_grpo(batch: AdvantageBatch, options: AdvantageOptions) -> tuple[np.ndarray, np.ndarray]:
    """(R - mean) / (std + 1e-6) within the group, std with n - 1 (arXiv 2402.03300).

    R is the trajectory's reward less the KL penalty of all its tokens. A trajectory whose siblings were lost has
    nothing to be compared with and gets 0.

    Raises:
        ValueError: every group has one member.
    """
    rewards = batch.grouped_rewards()
    rewards.require_siblings("grpo")
    return _outcome(batch, options, rewards.centred_M / (rewards.std_M + 1e-6))


@register_advantage_estimator("dr_grpo", needs_groups=True)
def estimate_dr_grpo(batch: AdvantageBatch, options: AdvantageOptions) -> tuple[np.ndarray, np.ndarray]:
    """R - mean within the group, not divided by anything (arXiv 2503.20783); R and lone trajectories as for grpo.

    Its loss adds up tokens and divides by a constant: aggregation "seq-mean-token-sum-norm".

    Raises:
        ValueError: every group has one member.
    """
    rewards = batch.grouped_rewards()
    rewards.require_siblings("dr_grpo")
    return _outcome(batch, options, rewards.centred_M)


@register_advantage_estimator("rloo", needs_groups=True)
def estimate_rloo(batch: AdvantageBatch, options: AdvantageOptions) -> tuple[np.ndarray, np.ndarray]:
    """R minus the mean of the others of the group, n / (n - 1) (R - mean) (arXiv 2402.14740); R as for grpo.

    A trajectory alone in its group has no baseline and keeps R.
    """
    rewards = batch.grouped_rewards()
    alone_M = rewards.size_M < 2
    scale_M = rewards.size_M / np.maximum(rewards.size_M - 1, 1)
    return _outcome(batch, options, np.where(alone_M, rewards.reward_M, scale_M * rewards.centred_M))


@register_advantage_estimator("reinforce_plus_plus")
def estimate_reinforce_plus_plus(batch: AdvantageBatch, options: AdvantageOptions) -> tuple[np.ndarray, np.ndarray]:
    """Discounted reward to go with the per-token KL penalty, whitened over the batch's tokens (arXiv 2501.03262)."""
    return_A = batch.monte_carlo(batch.rewards_N, options.gamma)
    return _whiten(return_A), return_A


@register_advantage_estimator("reinforce_plus_plus_baseline", needs_groups=True)
def estimate_reinforce_plus_plus_baseline(
    batch: AdvantageBatch, options: AdvantageOptions
) -> tuple[np.ndarray, np.ndarray]:
    """As reinforce_plus_plus, with the group's mean reward subtracted before the discounting and whitening.

    A trajectory whose siblings were lost gets 0 and is not whitened over.

    Raises:
        ValueError: every group has one member.
    """
    rewards = GroupedRewards(batch.of_trajectories(batch.rewards_N, "reward"), batch.group_M)
    rewards.require_siblings("reinforce_plus_plus_baseline")
    centred_A = batch.monte_carlo(rewards.centred_M[batch.trajectory_N], options.gamma)
    siblings_A = batch.on_tokens(rewards.size_M > 1)
    return _whiten(centred_A, only_A=siblings_A), batch.monte_carlo(batch.rewards_N, options.gamma)
