"""File formats of offline value pretraining: manifest (formulas A1), objective (A2), checkpoint contract (A4).

The formats live in this room so that a chain can be verified without the training code;
`miles.value_pretraining` exports the names that programs import.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.contracts.canonical import (
    StrictJsonError,
    canonical_json_bytes,
    parse_strict_json,
    real_path,
    require_file,
    require_finite,
    require_int,
    require_sha256,
    require_text,
    sha256_bytes,
)

VALUE_PRETRAIN_SCHEMA = "miles.value-pretrain.v1"
VALUE_PRETRAIN_CONTRACT_SCHEMA = "miles.value-pretrain-checkpoint.v1"
MANIFEST_NAME = "manifest.json"
VALUE_PRETRAIN_CONTRACT_NAME = "value_pretrain_contract.json"

LOSS_TYPES = ("mse", "classification")
TARGET_TYPES = ("two_hot", "hl_gauss")


@dataclass(frozen=True)
class ValueObjective:
    """What the value head learns: its loss, its support and its target (formulas A2)."""

    loss_type: str = "classification"
    num_bins: int = 51
    reward_low: float = 0.0
    reward_high: float = 1.0
    target_type: str = "hl_gauss"
    hl_gauss_sigma_ratio: float = 0.75

    def __post_init__(self) -> None:
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(f"objective.loss_type must be one of {', '.join(LOSS_TYPES)}, got {self.loss_type!r}")
        minimum = 2 if self.loss_type == "classification" else 1
        require_int(self.num_bins, field="objective.num_bins", minimum=minimum)
        require_finite(self.reward_low, field="objective.reward_range[0]")
        require_finite(self.reward_high, field="objective.reward_range[1]")
        if not self.reward_low < self.reward_high:
            shown = f"[{self.reward_low}, {self.reward_high}]"
            raise ValueError(f"objective.reward_range must be [LOW, HIGH] with LOW < HIGH, got {shown}")
        if self.target_type not in TARGET_TYPES:
            raise ValueError(
                f"objective.target_type must be one of {', '.join(TARGET_TYPES)}, got {self.target_type!r}"
            )
        if require_finite(self.hl_gauss_sigma_ratio, field="objective.hl_gauss_sigma_ratio") <= 0:
            raise ValueError(f"objective.hl_gauss_sigma_ratio must be above 0, got {self.hl_gauss_sigma_ratio}")

    @classmethod
    def from_dict(cls, raw: object) -> ValueObjective:
        """Build from the JSON object of a manifest or contract; absent keys take the defaults of A2."""
        if not isinstance(raw, Mapping):
            raise ValueError(f"objective must be an object, got {type(raw).__name__}")
        known = ("loss_type", "num_bins", "reward_range", "target_type", "hl_gauss_sigma_ratio")
        unknown = sorted(set(raw) - set(known))
        if unknown:
            raise ValueError(f"objective has unknown keys {', '.join(map(repr, unknown))}; known: {', '.join(known)}")
        reward_range = raw.get("reward_range", [0.0, 1.0])
        if not isinstance(reward_range, (list, tuple)) or len(reward_range) != 2:
            raise ValueError(f"objective.reward_range must be a list of two finite numbers, got {reward_range!r}")
        return cls(
            loss_type=raw.get("loss_type", "classification"),
            num_bins=raw.get("num_bins", 51),
            reward_low=require_finite(reward_range[0], field="objective.reward_range[0]"),
            reward_high=require_finite(reward_range[1], field="objective.reward_range[1]"),
            target_type=raw.get("target_type", "hl_gauss"),
            hl_gauss_sigma_ratio=require_finite(
                raw.get("hl_gauss_sigma_ratio", 0.75), field="objective.hl_gauss_sigma_ratio"
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return exactly the five keys of A2, `reward_range` as a list of floats."""
        return {
            "loss_type": self.loss_type,
            "num_bins": self.num_bins,
            "reward_range": [self.reward_low, self.reward_high],
            "target_type": self.target_type,
            "hl_gauss_sigma_ratio": self.hl_gauss_sigma_ratio,
        }


@dataclass(frozen=True)
class ValueDatasetSpec:
    """One split of a manifest: resolved path, SHA-256 of the file's bytes, number of rows."""

    path: Path
    sha256: str
    num_samples: int


@dataclass(frozen=True)
class ValuePretrainManifest:
    """A parsed manifest: its resolved path, the SHA-256 of its bytes, its splits and its objective."""

    path: Path
    sha256: str
    train: ValueDatasetSpec
    heldout: ValueDatasetSpec | None
    objective: ValueObjective


def _dataset_spec(raw: object, *, field: str, folder: Path) -> ValueDatasetSpec:
    if not isinstance(raw, Mapping):
        raise ValueError(f"{field} must be an object with path, sha256 and num_samples")
    path = require_text(raw.get("path"), field=f"{field}.path")
    if "\0" in path:
        raise ValueError(f"{field}.path must not hold a zero byte")
    return ValueDatasetSpec(
        path=real_path(folder / path),
        sha256=require_sha256(raw.get("sha256"), field=f"{field}.sha256"),
        num_samples=require_int(raw.get("num_samples"), field=f"{field}.num_samples", minimum=1),
    )


def require_input(path: Path, *, what: str) -> None:
    """Raise unless a regular file lies at `path`; the message begins with `what` it should be.

    Raises:
        FileNotFoundError, ValueError, OSError: as `require_file`.
    """
    try:
        require_file(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{what} does not exist: {path}") from None
    except ValueError as error:
        raise ValueError(f"{what} {error}: {path}") from None


def load_value_pretrain_manifest(
    path: str | os.PathLike[str], expected_sha256: str | None = None
) -> ValuePretrainManifest:
    """Read and validate a manifest; the data files it names are not opened (formulas A1).

    Args:
        expected_sha256: pin on the manifest's raw bytes, checked before they are parsed.

    Raises:
        FileNotFoundError: there is no such file.
        IsADirectoryError: it is a folder.
        ValueError: the pin does not match, it is no regular file, the JSON is not strict JSON, or a field breaks a
            rule of A1 or A2.
    """
    path = Path(path)
    if os.path.isdir(path):
        raise IsADirectoryError(f"value-pretraining manifest is a folder: {path}; give its {MANIFEST_NAME}")
    require_input(path, what="value-pretraining manifest")
    path = real_path(path)
    data = path.read_bytes()
    digest = sha256_bytes(data)
    if expected_sha256 is not None and digest != expected_sha256:
        raise ValueError(
            f"value-pretraining manifest SHA-256 mismatch: expected {expected_sha256}, got {digest} ({path})"
        )
    try:
        raw = parse_strict_json(data)
    except StrictJsonError as error:
        raise ValueError(f"invalid value-pretraining manifest JSON: {error} ({path})") from error
    try:
        if not isinstance(raw, dict):
            raise ValueError("manifest must be a JSON object")
        if raw.get("schema") != VALUE_PRETRAIN_SCHEMA:
            raise ValueError(f"manifest.schema must be {VALUE_PRETRAIN_SCHEMA!r}, got {raw.get('schema')!r}")
        heldout = raw.get("heldout")
        return ValuePretrainManifest(
            path=path,
            sha256=digest,
            train=_dataset_spec(raw.get("train"), field="manifest.train", folder=path.parent),
            heldout=None if heldout is None else _dataset_spec(heldout, field="manifest.heldout", folder=path.parent),
            objective=ValueObjective.from_dict(raw.get("objective")),
        )
    except ValueError as error:
        raise ValueError(f"{error} ({path})") from error


def batch_plan(*, seed: int, global_batch_size: int) -> dict[str, Any]:
    """Return the `batch_plan` object of a contract."""
    return {
        "seed": require_int(seed, field="seed"),
        "global_batch_size": require_int(global_batch_size, field="global_batch_size", minimum=1),
        "drop_incomplete_batch": True,
    }


def check_contract(raw: object) -> dict[str, Any]:
    """Return a contract's validated fields (formulas A4), or raise ValueError naming the field."""
    if not isinstance(raw, Mapping):
        raise ValueError("contract must be a JSON object")
    if raw.get("schema") != VALUE_PRETRAIN_CONTRACT_SCHEMA:
        raise ValueError(f"contract.schema must be {VALUE_PRETRAIN_CONTRACT_SCHEMA!r}, got {raw.get('schema')!r}")
    plan = raw.get("batch_plan")
    if not isinstance(plan, Mapping):
        raise ValueError("contract.batch_plan must be an object")
    require_int(plan.get("seed"), field="contract.batch_plan.seed")
    require_int(plan.get("global_batch_size"), field="contract.batch_plan.global_batch_size", minimum=1)
    if plan.get("drop_incomplete_batch") is not True:
        raise ValueError("contract.batch_plan.drop_incomplete_batch must be true")
    try:
        objective = ValueObjective.from_dict(raw.get("objective"))
    except ValueError as error:
        raise ValueError(f"contract.{error}") from error
    checked = {
        "schema": VALUE_PRETRAIN_CONTRACT_SCHEMA,
        "source_manifest_sha256": require_sha256(
            raw.get("source_manifest_sha256"), field="contract.source_manifest_sha256"
        ),
        "train_dataset_sha256": require_sha256(raw.get("train_dataset_sha256"), field="contract.train_dataset_sha256"),
        "objective": objective.to_dict(),
        "batch_plan": batch_plan(seed=plan["seed"], global_batch_size=plan["global_batch_size"]),
        "completed_steps": require_int(raw.get("completed_steps"), field="contract.completed_steps", minimum=1),
        "model_identity": require_text(raw.get("model_identity"), field="contract.model_identity"),
    }
    unknown = sorted((set(raw) - set(checked)) | (set(plan) - set(checked["batch_plan"])))
    if unknown:
        raise ValueError(f"contract has unknown keys {', '.join(map(repr, unknown))}")
    return checked


def contract_path(checkpoint: str | os.PathLike[str]) -> Path:
    """Return where the contract of a critic folder lies; a path to the contract itself is returned as it is."""
    path = Path(checkpoint)
    return path if path.name == VALUE_PRETRAIN_CONTRACT_NAME else path / VALUE_PRETRAIN_CONTRACT_NAME


def load_value_pretrain_contract(
    checkpoint: str | os.PathLike[str], expected_sha256: str | None = None
) -> dict[str, Any]:
    """Read and validate the contract of a critic folder (formulas A4).

    Args:
        checkpoint: the critic folder (or the contract file in it).
        expected_sha256: pin on the contract's raw bytes, checked before they are parsed.

    Raises:
        FileNotFoundError: the folder holds no contract.
        ValueError: the pin does not match, or a field breaks a rule of A4.
    """
    path = contract_path(checkpoint)
    require_input(path, what="value-pretraining checkpoint contract")
    data = path.read_bytes()
    digest = sha256_bytes(data)
    if expected_sha256 is not None and digest != expected_sha256:
        raise ValueError(
            "value-pretraining checkpoint contract SHA-256 mismatch: "
            f"expected {expected_sha256}, got {digest} ({path})"
        )
    try:
        return check_contract(parse_strict_json(data))
    except StrictJsonError as error:
        raise ValueError(f"invalid value-pretraining checkpoint contract JSON: {error} ({path})") from error
    except ValueError as error:
        raise ValueError(f"{error} ({path})") from error


def contract_sha256(checkpoint: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of the bytes of a critic folder's contract."""
    return sha256_bytes(contract_path(checkpoint).read_bytes())


def contract_bytes(contract: Mapping[str, Any]) -> bytes:
    """Return the canonical bytes of a valid contract."""
    return canonical_json_bytes(check_contract(contract))
