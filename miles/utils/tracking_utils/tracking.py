"""Metrics of a run: `metrics.jsonl` always, TensorBoard and Weights & Biases where asked for."""

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from miles.config.args import Args
from miles.config.files import config_yaml
from miles.contracts.canonical import parse_json
from miles.contracts.publish import publish_bytes
from miles.utils.tracking_utils.run_folder import read_run_json, update_run_json

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
NOT_REPRODUCED = (
    "time",
    "perf/",
    "idle/",
    "rollout/tokens_per_s",
    "rollout/engine_idle_fraction",
    "rollout/requests_resent",
    "rollout/log_prob_difference_mean",
)
"""How names begin that need not be the same in two runs of the same settings, whatever interrupted one of them: those
that depend on the clock or on lost engines, or compare the engine's arithmetic with Megatron's."""
_RESERVED = frozenset({"step", "stage", "time"})


class Tracker:
    """Writes metrics of one run; one JSON object a line: step, stage, time (seconds since 1970) and the metrics.

    A resumed run passes the first step it will log as `resume_step`: lines of that step and later are dropped, for
    they describe work that is done again.
    """

    def __init__(self, args: Args, *, resume_step: int | None = None) -> None:
        if args.run_dir is None:
            raise ValueError("--run-dir is needed to write metrics")
        self._args, self._folder = args, Path(args.run_dir)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._open(resume_step)
        # Where no line is left, nothing of an earlier start is gone on with.
        self._wandb = _wandb_run(args, goes_on=self._file.tell() > 0) if args.use_wandb else None

    def _open(self, resume_step: int | None) -> None:
        path = self._folder / METRICS_FILE
        if resume_step is not None:
            drop_steps_from(path, resume_step)
        self._file = path.open("a", encoding="utf-8")
        self._tensorboard = _tensorboard_writer(self._folder, resume_step) if self._args.tensorboard else None

    def sync(self) -> None:
        """Put every line on the disk: what says that a step is done must not outlive the step's figures."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def rewind(self, step: int) -> None:
        """Drop the lines of `step` and later: the work that they describe is done again."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        self._open(step)

    def log(self, step: int, stage: str, metrics: Mapping[str, Any]) -> None:
        """Write one line.

        Numbers reach TensorBoard and W&B too, as 'STAGE/NAME' unless the name has a slash; other values do not.
        A number that is not finite is written as null, for JSON has no name for it.
        """
        assert not _RESERVED & metrics.keys(), f"reserved metric names: {sorted(_RESERVED & metrics.keys())}"
        plain = {name: _plain(value) for name, value in metrics.items()}
        line = {"step": step, "stage": stage, "time": time.time(), **plain}
        try:
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            # A full disk names no file by itself.
            raise OSError(error.errno, error.strerror, self._file.name) from error
        numbers = {
            name if "/" in name else f"{stage}/{name}": value
            for name, value in plain.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        if self._tensorboard is not None:
            for name, value in numbers.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log({**numbers, f"{stage}/step": step})

    def close(self) -> None:
        """Flush and close everything; closing twice does nothing."""
        if self._file.closed:
            return
        self.sync()
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()


_current: Tracker | None = None


def init_tracking(args: Args, *, resume_step: int | None = None) -> Tracker:
    """Open the tracker of this process (closing an earlier one) and return it."""
    global _current
    finish_tracking()
    _current = Tracker(args, resume_step=resume_step)
    return _current


def finish_tracking() -> None:
    """Close the tracker of this process, if one is open."""
    global _current
    if _current is not None:
        _current.close()
        _current = None


def has_line(path: Path, *, step: int, stage: str) -> bool:
    """Whether a whole line of a step and stage stands in a file of metrics."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        found = (parse_json(line, where=path) for line in file if line.endswith(b"\n"))
        return any((line.get("step"), line.get("stage")) == (step, stage) for line in found)


def drop_steps_from(path: Path, step: int) -> None:
    """Remove the lines of `step` and later, and a last line that a killed process left unfinished."""
    if not path.exists():
        return
    kept = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            continue
        try:
            before = parse_json(line, where=path)["step"] < step
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}:{number}: expected a JSON object with a number 'step'") from None
        if before:
            kept.append(line)
    publish_bytes(path, b"".join(kept))


def _plain(value: Any) -> Any:
    """A JSON-safe copy: NumPy and torch scalars become Python numbers, numbers that are not finite become None."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if not isinstance(value, int | float):
        value = value.tolist()
        if isinstance(value, list):
            return _plain(value)
    return value if math.isfinite(value) else None


def _tensorboard_writer(folder: Path, resume_step: int | None) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"), purge_step=resume_step)


def _wandb_run(args: Args, *, goes_on: bool) -> Any:
    """A run on W&B, or the one whose id run.json has, where this start goes on with it."""
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError("--use-wandb: wandb is not installed; run: pip install 'miles[wandb]'") from None
    assert args.run_dir is not None
    known = read_run_json(args.run_dir).get("wandb_run_id") if goes_on else None
    run = wandb.init(
        project="miles",
        name=Path(args.run_dir).name,
        dir=args.run_dir,
        config={"yaml": config_yaml(args)},
        id=known,
        # Not "must": what was deleted there, or only logged on disk, is no reason to stop.
        resume=None if known is None else "allow",
    )
    if run.id != known:
        update_run_json(args.run_dir, wandb_run_id=run.id)
    return run
