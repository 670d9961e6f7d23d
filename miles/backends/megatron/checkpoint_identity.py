"""What a Megatron checkpoint says of itself, and where the newest complete one is. Imports no Megatron."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from miles.backends.megatron.architecture import Architecture
from miles.contracts.canonical import read_json

IDENTITY_FILE = "identity.json"
IDENTITY_SCHEMA = "miles.megatron-checkpoint.v1"
LATEST_FILE = "latest"

Role = Literal["actor", "critic"]


@dataclass(frozen=True, kw_only=True)
class ValueHeadIdentity:
    """Shape and meaning of a critic's head."""

    width: int
    loss_type: str
    reward_range: tuple[float, float] | None
    """Range the bins stand for; None for a scalar head."""

    @classmethod
    def from_args(cls, args: Any) -> ValueHeadIdentity:
        if args.value_loss_type == "mse":
            return cls(width=1, loss_type="mse", reward_range=None)
        low, high = args.value_reward_range
        return cls(width=args.value_num_bins, loss_type=args.value_loss_type, reward_range=(float(low), float(high)))


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Everything that must fit before a checkpoint's tensors are worth reading."""

    role: Role
    architecture: Architecture
    value_head: ValueHeadIdentity | None
    iteration: int
    dtype: str
    optimizer: Literal["plain", "distributed"] | None
    """Format of the optimizer state; None where no step was taken yet."""
    parallel: dict[str, int]
    device: str

    def to_dict(self) -> dict[str, Any]:
        return {"schema": IDENTITY_SCHEMA, **asdict(self)}

    @classmethod
    def read(cls, folder: Path) -> Identity:
        """Read identity.json of a checkpoint folder.

        Raises:
            ValueError: The file is missing or damaged; names it.
        """
        path = folder / IDENTITY_FILE
        try:
            raw = read_json(path)
        except FileNotFoundError:
            raise ValueError(f"{folder}: no {IDENTITY_FILE}: not a complete checkpoint") from None
        if not isinstance(raw, dict) or raw.pop("schema", None) != IDENTITY_SCHEMA:
            raise ValueError(f"{path}: schema must be {IDENTITY_SCHEMA!r}")
        try:
            head = raw.pop("value_head")
            if head is not None:
                bounds = head.pop("reward_range")
                head = ValueHeadIdentity(reward_range=None if bounds is None else tuple(bounds), **head)
            return cls(architecture=Architecture(**raw.pop("architecture")), value_head=head, **raw)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}: damaged ({error})") from None


def find_checkpoint(path: str | Path) -> Path:
    """The iteration folder that `path` means: itself, or the one its `latest` file names.

    Raises:
        ValueError: There is no complete checkpoint.
    """
    path = Path(path)
    if (path / IDENTITY_FILE).is_file():
        return path
    pointer = path / LATEST_FILE
    if not pointer.is_file():
        raise ValueError(f"{path}: holds no checkpoint: there is no file {LATEST_FILE!r} that names one")
    folder = path / pointer.read_text().strip()
    if not (folder / IDENTITY_FILE).is_file():
        raise ValueError(f"{pointer}: names {folder.name!r}, which is missing or incomplete")
    return folder


def check_identity(found: Identity, wanted: Identity, *, folder: Path, bootstrap: bool = False) -> None:
    """Refuse a checkpoint of another model, role or head.

    Args:
        found: What the checkpoint says.
        wanted: What this run is.
        bootstrap: A critic takes an actor's backbone: the role differs, the head is new, and tying plays no part.

    Raises:
        ValueError: Names the folder, the first field that differs, and both values.
    """

    def compare(field: str, theirs: Any, ours: Any) -> None:
        if theirs != ours:
            raise ValueError(f"{folder}: {field} is {theirs!r} in the checkpoint, {ours!r} in this run")

    compare("role", found.role, "actor" if bootstrap else wanted.role)
    ours = wanted.architecture.to_dict()
    for field, theirs in found.architecture.to_dict().items():
        if not (bootstrap and field == "tied_embeddings"):
            compare(f"architecture.{field}", theirs, ours[field])
    if bootstrap:
        return
    if found.value_head is None or wanted.value_head is None:
        compare("value_head", found.value_head, wanted.value_head)
        return
    for field, theirs in asdict(found.value_head).items():
        compare(f"value_head.{field}", theirs, getattr(wanted.value_head, field))
