"""Rollouts to value rows: Monte-Carlo returns, a held-out split by prompt, and an account of every row left out.

Two passes over the rollouts: the first looks at every row and keeps 50-odd bytes of it, the second writes the chosen
rows, so the data never has to fit in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import random
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

from miles.contracts.canonical import (
    UTF8_BOM,
    StrictJsonError,
    canonical_json_bytes,
    parse_strict_json,
    readable_json_bytes,
    require_int,
    require_number,
    sha256_bytes,
    sha256_file,
)
from miles.contracts.publish import publish_folder
from miles.contracts.value_schema import MANIFEST_NAME, VALUE_PRETRAIN_SCHEMA, ValueObjective

CONVERSION_REPORT_SCHEMA = "miles.value-pretrain-conversion-report.v1"
CONVERSION_REPORT_NAME = "conversion_report.json"
SPLITS = ("train", "heldout")

_STATUS_REASONS = {
    "pending": "the sample was never generated",
    "aborted": "generation was aborted",
    "failed": "generation failed",
}
# Ordinary life of a rollout; every other reason is a fault in the rollouts, which `strict` refuses.
EXPECTED_REASONS = frozenset({f"status_{status}" for status in _STATUS_REASONS} | {"label_mix"})
_EXAMPLES = 5


@dataclass(frozen=True)
class ConversionOptions:
    """How rollouts become a value data set.

    Attributes:
        gamma: discount per trainable token; observation tokens do not discount.
        heldout_fraction: part of the distinct prompts held out, when no held-out rollouts are given.
        seed: orders prompts for the split, and rows for a balanced label mix.
        label_mix: "natural", or "balanced": as many rows of each reward as of the rarest, in each split.
        rows_per_label: with a balanced mix, at most so many rows of each reward in (train, heldout) instead; a rarer
            reward keeps all its rows and takes none from the others.
        max_tokens: longer rows keep their last `max_tokens` tokens; None keeps all.
        strict: refuse the whole conversion where a completed row would be left out.
    """

    gamma: float = 1.0
    heldout_fraction: float = 0.2
    seed: int = 1234
    label_mix: str = "natural"
    rows_per_label: tuple[int, int] | None = None
    max_tokens: int | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.gamma <= 1.0:
            raise ValueError(f"--gamma must be between 0 and 1, got {self.gamma}")
        if not 0.0 < self.heldout_fraction < 1.0:
            raise ValueError(f"--heldout-fraction must be between 0 and 1, both excluded, got {self.heldout_fraction}")
        if self.label_mix not in ("natural", "balanced"):
            raise ValueError(f"--label-mix must be natural or balanced, got {self.label_mix!r}")
        if self.rows_per_label is not None:
            if self.label_mix != "balanced":
                raise ValueError("--rows-per-label needs --label-mix balanced")
            if min(self.rows_per_label) < 1:
                raise ValueError(f"--rows-per-label must be at least 1 in each split, got {self.rows_per_label}")
        if self.max_tokens is not None and self.max_tokens < 2:
            raise ValueError(
                f"--max-tokens must be at least 2, one prompt and one target token, got {self.max_tokens}"
            )


def monte_carlo_returns(*, reward: float, loss_mask: Sequence[int], gamma: float) -> list[float]:
    """Return the discounted terminal reward at each response token (lambda = 1: nothing is bootstrapped).

    The reward falls on the last trainable token. Only trainable tokens discount; an observation takes the return of
    the next trainable token, and is masked anyway.

    Returns:
        One float per entry of `loss_mask`: reward * gamma ** (trainable tokens after the next trainable one).
    """
    returns, current, following = [0.0] * len(loss_mask), reward, reward
    for t in range(len(loss_mask) - 1, -1, -1):
        if loss_mask[t]:
            following, current = current, current * gamma
        returns[t] = following
    return returns


def suffix_window(
    *, num_tokens: int, response_length: int, loss_mask: Sequence[int], max_tokens: int | None
) -> tuple[int, int]:
    """Return [start, end) of the last `max_tokens` tokens, or of those up to the last target if they hold none.

    The window keeps at least one token before its first target, so there is a hidden state to read the value from.
    """
    if max_tokens is None or num_tokens <= max_tokens:
        return 0, num_tokens
    prompt_length = num_tokens - response_length
    last_target = prompt_length + max(t for t, active in enumerate(loss_mask) if active)
    end = num_tokens if last_target > num_tokens - max_tokens else last_target + 1
    return max(0, end - max_tokens), end


@dataclass(frozen=True)
class _Row:
    source: int
    line: int
    offset: int
    prompt: bytes
    reward: float
    heldout: bool


@dataclass(frozen=True)
class _Rollout:
    tokens: list[int]
    response_length: int
    loss_mask: list[int]
    reward: float
    sample_id: str


class _LeftOut(Exception):
    """A row that is not taken; the message is the reason's key in the conversion report."""


def _int_list(row: dict[str, Any], name: str, *, high: int) -> list[int]:
    value = row.get(name)
    if not isinstance(value, list) or any(type(x) not in (int, bool) or not 0 <= x <= high for x in value):
        raise ValueError(f"{name} must be a list of integers between 0 and {high}")
    return [int(x) for x in value]


def _parse_rollout(line: bytes, *, location: str, sample_id: str) -> _Rollout:
    try:
        row = parse_strict_json(line, allow_non_finite=True)
        if not isinstance(row, dict):
            raise ValueError("must be a JSON object, one sample a line")
        if "returns" in row:
            raise ValueError(
                "carries returns of its own; returns are made here from rewards, as Monte-Carlo returns: a critic "
                "judged against lambda-returns is judged against itself"
            )
        status = row.get("status", "completed")
        if isinstance(status, str) and status in _STATUS_REASONS:
            raise _LeftOut(f"status_{status}")
        if status not in ("completed", "truncated"):
            raise ValueError(f"status must be completed, truncated, pending, aborted or failed, got {status!r}")
        tokens = _int_list(row, "tokens", high=2**31 - 1)
        length = require_int(row.get("response_length"), field="response_length", minimum=0)
        loss_mask = [1] * length if "loss_mask" not in row else _int_list(row, "loss_mask", high=1)
        if len(loss_mask) != length:
            raise ValueError(f"loss_mask has {len(loss_mask)} entries, response_length is {length}")
        if length > len(tokens):
            raise ValueError(f"response_length {length} exceeds the {len(tokens)} tokens")
        reward = row.get("reward")
        if reward is not None:
            reward = require_number(reward, field="reward")
    except StrictJsonError as error:
        raise ValueError(f"{location}: invalid JSON: {error}") from error
    except ValueError as error:
        raise ValueError(f"{location}: {error}") from error
    if reward is None:
        raise _LeftOut("reward_missing")
    if not math.isfinite(reward):
        raise _LeftOut("reward_not_finite")
    if length == len(tokens):
        raise _LeftOut("no_prompt_token")
    if not any(loss_mask):
        raise _LeftOut("no_trainable_token")
    return _Rollout(tokens, length, loss_mask, reward, sample_id)


def _prompt_digest(tokens: Sequence[int]) -> bytes:
    return hashlib.sha256(json.dumps(tokens, separators=(",", ":")).encode()).digest()


def rollout_files(path: str | os.PathLike[str]) -> list[Path]:
    """Return the JSONL files of a path: itself, a folder's, or a run folder's `rollouts/`, in order of name.

    Raises:
        FileNotFoundError: there are none.
    """
    path = Path(path)
    if path.is_file():
        return [path]
    folder = path / "rollouts" if (path / "rollouts").is_dir() else path
    files = sorted(folder.glob("*.jsonl")) if folder.is_dir() else []
    if not files:
        raise FileNotFoundError(f"no rollouts: {path} is neither a JSONL file nor a folder with some")
    return files


def _refuse_copies(sources: Sequence[Path]) -> None:
    """Raise ValueError where two files hold the same bytes: their rows would count twice."""
    of_size: dict[int, list[Path]] = {}
    for path in sources:
        of_size.setdefault(path.stat().st_size, []).append(path)
    for size, paths in of_size.items():
        first: dict[str, Path] = {}
        for path in paths if size and len(paths) > 1 else []:
            twin = first.setdefault(sha256_file(path), path)
            if twin is not path:
                raise ValueError(f"rollouts named twice: {path} has the same bytes as {twin}")


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    offset = 0
    with path.open("rb", buffering=1 << 20) as stream:
        for number, line in enumerate(stream, start=1):
            if number == 1 and line.startswith(UTF8_BOM):
                raise ValueError(f"{path}:1: starts with a byte-order mark; expected plain UTF-8")
            if not line.isspace():
                yield number, offset, line
            offset += len(line)


class _Account:
    """Counts of what was read, kept and left out, with the first places of each reason."""

    def __init__(self) -> None:
        self.read = 0
        self.dropped: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}

    def drop(self, reason: str, location: str) -> None:
        self.dropped[reason] += 1
        places = self.examples.setdefault(reason, [])
        if len(places) < _EXAMPLES:
            places.append(location)


def _survey(sources: Sequence[Path], *, first_heldout: int, account: _Account) -> list[_Row]:
    rows = []
    for ordinal, path in enumerate(sources):
        for number, offset, line in _lines(path):
            account.read += 1
            location = f"{path}:{number}"
            try:
                rollout = _parse_rollout(line, location=location, sample_id=f"{ordinal}:{number}")
            except _LeftOut as reason:
                account.drop(str(reason), location)
                continue
            prompt = _prompt_digest(rollout.tokens[: -rollout.response_length])
            rows.append(_Row(ordinal, number, offset, prompt, rollout.reward, ordinal >= first_heldout))
    return rows


def _split_by_prompt(rows: list[_Row], *, options: ConversionOptions) -> dict[str, list[_Row]]:
    prompts = sorted(
        {row.prompt for row in rows}, key=lambda p: hashlib.sha256(f"{options.seed}:".encode() + p).digest()
    )
    if len(prompts) < 2:
        raise ValueError(
            f"a held-out split by prompt needs at least two distinct prompts, the rollouts have {len(prompts)}"
        )
    count = min(max(1, round(options.heldout_fraction * len(prompts))), len(prompts) - 1)
    heldout = set(prompts[:count])
    return {
        "train": [row for row in rows if row.prompt not in heldout],
        "heldout": [row for row in rows if row.prompt in heldout],
    }


def _split_as_given(rows: list[_Row], *, sources: Sequence[Path]) -> dict[str, list[_Row]]:
    split = {"train": [r for r in rows if not r.heldout], "heldout": [r for r in rows if r.heldout]}
    seen = {row.prompt: row for row in split["train"]}
    for row in split["heldout"]:
        if row.prompt in seen:
            twin = seen[row.prompt]
            raise ValueError(
                f"{sources[row.source]}:{row.line}: leaking prompt: the same prompt tokens are trained on at "
                f"{sources[twin.source]}:{twin.line}"
            )
    return split


def _balanced(
    rows: list[_Row], *, quota: int | None, seed: int, sources: Sequence[Path], account: _Account
) -> list[_Row]:
    groups: dict[float, list[_Row]] = {}
    for row in rows:
        groups.setdefault(row.reward, []).append(row)
    if quota is None:
        quota = min(map(len, groups.values()), default=0)
    kept: set[tuple[int, int]] = set()
    rng = random.Random(seed)
    for reward in sorted(groups):
        kept |= {(row.source, row.line) for row in rng.sample(groups[reward], min(quota, len(groups[reward])))}
    for row in rows:
        if (row.source, row.line) not in kept:
            account.drop("label_mix", f"{sources[row.source]}:{row.line}")
    return [row for row in rows if (row.source, row.line) in kept]


def _warnings(splits: dict[str, dict[str, Any]]) -> list[str]:
    """Return what keeps the gate from ever judging a critic on these splits, a sentence each."""
    found = []
    for name, part in splits.items():
        if len(part["rewards"]) == 1:
            found.append(
                f"all {part['rows']} rows of the {name} split have the reward {float(next(iter(part['rewards']))):g}: "
                "explained variance needs two, so a critic cannot be evaluated on this split"
            )
        if part["several_returns"]:
            found.append(
                f"{part['several_returns']} rows of the {name} split have several returns (--gamma below 1): "
                "evaluation takes rows of one return, so a critic cannot be evaluated on this split"
            )
    return found


def _value_row(rollout: _Rollout, *, options: ConversionOptions) -> tuple[dict[str, Any], bool]:
    returns = monte_carlo_returns(reward=rollout.reward, loss_mask=rollout.loss_mask, gamma=options.gamma)
    prompt_length = len(rollout.tokens) - rollout.response_length
    start, end = suffix_window(
        num_tokens=len(rollout.tokens),
        response_length=rollout.response_length,
        loss_mask=rollout.loss_mask,
        max_tokens=options.max_tokens,
    )
    first = max(prompt_length, start + 1)
    return {
        "sample_id": rollout.sample_id,
        "tokens": rollout.tokens[start:end],
        "response_length": end - first,
        "returns": returns[first - prompt_length : end - prompt_length],
        "loss_mask": rollout.loss_mask[first - prompt_length : end - prompt_length],
    }, (start, end) != (0, len(rollout.tokens))


def _write_split(
    path: Path, rows: list[_Row], *, sources: Sequence[Path], options: ConversionOptions, objective: ValueObjective
) -> dict[str, Any]:
    windowed = targets = tokens = cut_tokens = cut_targets = several = 0
    labels: Counter[float] = Counter()
    digest = hashlib.sha256()
    with contextlib.ExitStack() as stack:
        streams = {i: stack.enter_context(sources[i].open("rb")) for i in sorted({row.source for row in rows})}
        out = stack.enter_context(path.open("wb", buffering=1 << 20))
        for row in rows:
            location = f"{sources[row.source]}:{row.line}"
            streams[row.source].seek(row.offset)
            try:
                rollout = _parse_rollout(
                    streams[row.source].readline(), location=location, sample_id=f"{row.source}:{row.line}"
                )
                same = (rollout.reward, _prompt_digest(rollout.tokens[: -rollout.response_length]))
            except _LeftOut:
                raise ValueError(f"{location}: changed while it was read") from None
            if same != (row.reward, row.prompt):
                raise ValueError(f"{location}: changed while it was read")
            value_row, shortened = _value_row(rollout, options=options)
            returns = value_row["returns"]
            low, high = objective.reward_low, objective.reward_high
            if objective.loss_type == "classification" and not low <= min(returns) <= max(returns) <= high:
                raise ValueError(
                    f"{location}: returns [{min(returns):g}, {max(returns):g}] leave --value-reward-range "
                    f"[{low:g}, {high:g}]"
                )
            line = canonical_json_bytes(value_row)
            digest.update(line)
            out.write(line)
            windowed += shortened
            several += len(set(compress(returns, value_row["loss_mask"]))) > 1
            targets += sum(value_row["loss_mask"])
            tokens += len(value_row["tokens"])
            cut_targets += sum(rollout.loss_mask) - sum(value_row["loss_mask"])
            cut_tokens += len(rollout.tokens) - len(value_row["tokens"])
            labels[rollout.reward] += 1
    return {
        "rows": len(rows),
        "prompts": len({row.prompt for row in rows}),
        "tokens": tokens,
        "targets": targets,
        "windowed": windowed,
        "several_returns": several,
        "window_dropped": {"tokens": cut_tokens, "targets": cut_targets},
        "rewards": {format(label, ".17g"): count for label, count in sorted(labels.items())},
        "sha256": digest.hexdigest(),
    }


def build_value_dataset(
    rollouts: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    objective: ValueObjective,
    options: ConversionOptions,
    heldout_rollouts: Sequence[str | os.PathLike[str]] = (),
) -> dict[str, Any]:
    """Turn rollouts into `out/`: manifest.json, train.jsonl, heldout.jsonl and conversion_report.json.

    The folder appears whole, by one rename, or not at all. The same rollouts and options give the same bytes.

    Args:
        rollouts: JSONL files of `Sample.to_dict` lines, or folders of them.
        heldout_rollouts: held-out rollouts collected apart; a prompt that is trained on is refused. Where none are
            given, prompts are held out of `rollouts`.

    Returns:
        The conversion report, with `manifest_path` and `manifest_sha256` added.

    Raises:
        FileNotFoundError: no rollouts.
        FileExistsError: `out` holds a manifest, or anything else, or is no folder.
        ValueError: a malformed row (`path:line`), a file named twice or copied, a leaking prompt, returns outside the
            reward range, a split without rows, or, when strict, a completed row that would be left out.
        OSError: the disk is full, or another error of the file system; nothing is left behind.
    """
    out = Path(out)
    if os.path.lexists(out / MANIFEST_NAME):
        raise FileExistsError(f"refusing to overwrite an existing manifest: {out / MANIFEST_NAME}")
    if os.path.lexists(out) and not out.is_dir():
        raise FileExistsError(f"--out {out}: exists and is not a folder; the data set needs a new one")
    if os.path.lexists(out) and any(out.iterdir()):
        raise FileExistsError(f"refusing to write into a folder that is not empty: {out}")
    train_sources = [file for path in rollouts for file in rollout_files(path)]
    sources = train_sources + [file for path in heldout_rollouts for file in rollout_files(path)]
    resolved = Counter(path.resolve() for path in sources)
    if twice := [path for path, count in resolved.items() if count > 1]:
        raise ValueError(f"rollouts named twice: {twice[0]}")
    _refuse_copies(sources)
    account = _Account()
    rows = _survey(sources, first_heldout=len(train_sources), account=account)
    faults = {reason: n for reason, n in account.dropped.items() if reason not in EXPECTED_REASONS}
    if options.strict and faults:
        reason = next(iter(faults))
        raise ValueError(
            f"--strict: {account.examples[reason][0]}: {reason} ({sum(faults.values())} such rows in all)"
        )
    split = _split_as_given(rows, sources=sources) if heldout_rollouts else _split_by_prompt(rows, options=options)
    if options.label_mix == "balanced":
        quotas: dict[str, int | None] = dict(zip(SPLITS, options.rows_per_label or (None, None), strict=True))
        split = {
            name: _balanced(rows, quota=quotas[name], seed=options.seed, sources=sources, account=account)
            for name, rows in split.items()
        }
    for name in SPLITS:
        if not split[name]:
            raise ValueError(
                f"no rows for the {name} split: {account.read} rollouts read, left out: {dict(account.dropped)}"
            )
    temporary = out.parent / f".{out.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    try:
        # Where a file stands in the way, the next line says so better.
        with contextlib.suppress(FileExistsError):
            out.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        report = _write_all(temporary, split, sources=sources, account=account, objective=objective, options=options)
        manifest_sha256 = sha256_file(temporary / MANIFEST_NAME)
        publish_folder(temporary, out)
    except OSError as error:
        # A full disk reports no file name by itself, and nobody asked for the temporary one.
        there = Path(error.filename or out)
        ours = temporary in (there, *there.parents) or there in out.parents
        raise OSError(error.errno, error.strerror, str(out if ours else there)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return {**report, "manifest_path": str((out / MANIFEST_NAME).resolve()), "manifest_sha256": manifest_sha256}


def _write_all(
    folder: Path,
    split: dict[str, list[_Row]],
    *,
    sources: Sequence[Path],
    account: _Account,
    objective: ValueObjective,
    options: ConversionOptions,
) -> dict[str, Any]:
    written = {
        name: _write_split(
            folder / f"{name}.jsonl", split[name], sources=sources, options=options, objective=objective
        )
        for name in SPLITS
    }
    assert not {row.prompt for row in split["train"]} & {row.prompt for row in split["heldout"]}
    how = {
        "returns": "monte_carlo",
        "lambda": 1.0,
        "gamma": options.gamma,
        "split_by": "prompt_tokens",
        "heldout": "given" if any(row.heldout for row in split["heldout"]) else options.heldout_fraction,
        "label_mix": options.label_mix,
        "rows_per_label": None if options.rows_per_label is None else list(options.rows_per_label),
        "max_tokens": options.max_tokens,
        "seed": options.seed,
    }
    report = {
        "schema": CONVERSION_REPORT_SCHEMA,
        "options": how,
        "sources": [
            {"ordinal": i, "path": str(path.resolve()), "size": path.stat().st_size, "sha256": sha256_file(path)}
            for i, path in enumerate(sources)
        ],
        "rows_read": account.read,
        "rows_kept": sum(part["rows"] for part in written.values()),
        "rows_dropped": dict(sorted(account.dropped.items())),
        "dropped_examples": dict(sorted(account.examples.items())),
        "splits": written,
        "warnings": _warnings(written),
    }
    assert report["rows_read"] == report["rows_kept"] + sum(account.dropped.values())
    report_bytes = readable_json_bytes(report)
    (folder / CONVERSION_REPORT_NAME).write_bytes(report_bytes)
    manifest: dict[str, Any] = {
        "schema": VALUE_PRETRAIN_SCHEMA,
        "objective": objective.to_dict(),
        "provenance": {
            "tool": "tools/build_value_dataset.py",
            **how,
            "conversion_report": {"path": CONVERSION_REPORT_NAME, "sha256": sha256_bytes(report_bytes)},
        },
    }
    for name, part in written.items():
        manifest[name] = {"path": f"{name}.jsonl", "sha256": part["sha256"], "num_samples": part["rows"]}
    (folder / MANIFEST_NAME).write_bytes(readable_json_bytes(manifest))
    return report
