"""One trajectory: prompt and response tokens with every per-token column kept aligned."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from miles.contracts.canonical import parse_strict_json


class SampleStatus(StrEnum):
    """Where a sample stands. Only COMPLETED and TRUNCATED samples may be trained on."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


TRAINABLE_STATUSES = frozenset({SampleStatus.COMPLETED, SampleStatus.TRUNCATED})


@dataclass(slots=True)
class Sample:
    """A prompt and what was generated for it.

    `tokens` holds prompt then response; the last `response_length` of them are the response. `loss_mask` (1 = an
    action of the policy, 0 = an observation) and `rollout_log_probs` (log-probability under the policy that sampled,
    0.0 for observations) have one entry per response token. `weight_versions` lists the versions of the weights that
    generated, in order of first use.
    """

    index: int
    group_index: int
    rollout_id: int
    prompt: str
    tokens: list[int]
    response_length: int = 0
    response: str = ""
    label: Any = None
    reward: float | None = None
    loss_mask: list[int] = field(default_factory=list)
    rollout_log_probs: list[float] = field(default_factory=list)
    status: SampleStatus = SampleStatus.PENDING
    weight_versions: list[str] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""
        return len(self.tokens) - self.response_length

    @property
    def response_tokens(self) -> list[int]:
        """The response's token ids."""
        return self.tokens[self.prompt_length :]

    def append_response_tokens(
        self, tokens: Sequence[int], *, log_probs: Sequence[float] | None = None, trainable: bool = True
    ) -> None:
        """Append tokens to the response together with all their per-token columns, or raise and change nothing.

        Trainable tokens (actions) need the sampling policy's log-probabilities. Observations have none.

        Raises:
            ValueError: lengths differ, a log-probability is missing or not finite, a token id is not an integer >= 0.
        """
        where = f"sample {self.index}"
        if trainable and log_probs is None:
            raise ValueError(f"{where}: trainable tokens need log_probs, one for each of {len(tokens)} tokens")
        if not trainable and log_probs is not None:
            raise ValueError(f"{where}: observation tokens (trainable=False) take no log_probs")
        if log_probs is not None and len(log_probs) != len(tokens):
            raise ValueError(f"{where}: {len(tokens)} tokens came with {len(log_probs)} log_probs")
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise ValueError(f"{where}: token ids must be integers >= 0, got {token!r}")
        if log_probs is not None:
            for position, log_prob in enumerate(log_probs):
                if not math.isfinite(log_prob):
                    raise ValueError(f"{where}: log_probs[{position}] is {log_prob}, expected a finite number")
        self.tokens.extend(tokens)
        self.loss_mask.extend([int(trainable)] * len(tokens))
        self.rollout_log_probs.extend([0.0] * len(tokens) if log_probs is None else [float(x) for x in log_probs])
        self.response_length += len(tokens)

    def check_aligned(self) -> None:
        """Raise ValueError unless the per-token columns agree with `response_length`."""
        for name in ("loss_mask", "rollout_log_probs"):
            length = len(getattr(self, name))
            if length != self.response_length:
                raise ValueError(
                    f"sample {self.index}: {name} has {length} entries, response_length is {self.response_length}"
                )
        if not 0 <= self.response_length <= len(self.tokens):
            raise ValueError(
                f"sample {self.index}: response_length {self.response_length} does not fit {len(self.tokens)} tokens"
            )

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe dictionary; `from_dict` gives the sample back."""
        return {**asdict(self), "status": self.status.value}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Sample":
        """Inverse of `to_dict`.

        Raises:
            ValueError: unknown or missing fields, a value of another type, unknown status, misaligned columns.
        """
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(data) - known):
            raise ValueError(f"sample has unknown fields: {', '.join(unknown)}")
        if missing := [
            name for name in ("index", "group_index", "rollout_id", "prompt", "tokens") if name not in data
        ]:
            raise ValueError(f"sample misses fields: {', '.join(missing)}")
        for name, value in data.items():
            _check_type(name, value, sample=f"sample {data['index']!r}")
        sample = cls(**{**data, "status": SampleStatus(data.get("status", SampleStatus.PENDING.value))})
        sample.check_aligned()
        return sample


_NUMBERS = frozenset({int, float})
_LISTS: dict[str, frozenset[type]] = {
    "tokens": frozenset({int}),
    "loss_mask": _NUMBERS | {bool},
    "rollout_log_probs": _NUMBERS,
    "weight_versions": frozenset({str}),
}
"""Types of the entries of a sample's lists."""
_PLAIN: dict[str, frozenset[type]] = {
    **dict.fromkeys(("index", "group_index", "rollout_id", "response_length"), frozenset({int})),
    **dict.fromkeys(("prompt", "response", "status"), frozenset({str})),
    "metadata": frozenset({dict}),
    "reward": _NUMBERS | {bool, type(None)},
}


def _check_type(name: str, value: Any, *, sample: str) -> None:
    """Raise ValueError, naming `sample`, unless a value out of JSON has the type of the field `name`."""
    found, allowed, entries = {type(value)}, _PLAIN.get(name), ""
    if name in _LISTS:
        allowed, entries = frozenset({list}), "a list of "
        if isinstance(value, list):
            # As a set: a loop over every token is slow.
            found, allowed = set(map(type, value)), _LISTS[name]
    if allowed is not None and not found <= allowed:
        known = _LISTS.get(name, allowed)
        kinds = " or ".join(sorted("null" if kind is type(None) else kind.__name__ for kind in known))
        others = ", ".join(sorted(kind.__name__ for kind in found - allowed))
        raise ValueError(f"{sample}: {name} must be {entries}{kinds}, got {others}")
    if allowed is not None and int in found:
        for number in (min(value), max(value)) if name in _LISTS else (value,):
            if type(number) is int and not -(2**63) <= number < 2**63:
                raise ValueError(f"{sample}: {name} has an integer of more than 64 bits")


def read_samples(path: Path) -> list[Sample]:
    """The samples of a kept rollout, one JSON object a line.

    Raises:
        ValueError: a line that is no sample, naming `path:line`; a file without samples.
    """
    samples = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                # A log-probability that nothing reads may be what JSON has no name for.
                row = parse_strict_json(line, allow_non_finite=True)
                if not isinstance(row, dict):
                    raise ValueError("expected a JSON object")
                samples.append(Sample.from_dict(row))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
    if not samples:
        raise ValueError(f"{path}: no samples")
    return samples
