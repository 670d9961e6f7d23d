"""What the example drivers share: run programs one after another, skip what is done, watch time and memory."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from miles.config.args import nearest
from miles.contracts.publish import publish_bytes, publish_json

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Stage:
    """One program.

    Attributes:
        makes: the folders and files it makes, which are removed before it runs.
        only_looks: changes nothing: runs at every start, and no later stage has to run again because of it.
    """

    name: str
    command: list[str]
    makes: list[Path]
    only_looks: bool = False


@dataclass(frozen=True)
class Totals:
    """What running the stages took, those skipped left out.

    Attributes:
        seconds: wall clock of all.
        peak: most memory in use at once, bytes.
    """

    seconds: float
    peak: int


class PeakMemory(threading.Thread):
    """Watches the memory of this process and all below it, shared pages shared out.

    Attributes:
        peak: the highest so far, bytes.
        since_mark: the highest since the last `mark()`.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self.since_mark = 0
        self._resident = 0

    def mark(self) -> None:
        self.since_mark = self._resident = 0

    def run(self) -> None:
        me = psutil.Process()
        while True:
            below = [me, *me.children(recursive=True)]
            resident = _total(below, lambda process: process.memory_info().rss)
            # Sharing out shared pages makes the kernel walk through all of them: only where there is something new.
            if resident > 1.03 * self._resident:
                self._resident = resident
                shared_out = _total(below, lambda process: process.memory_full_info().pss)
                self.peak = max(self.peak, shared_out)
                self.since_mark = max(self.since_mark, shared_out)
            time.sleep(2.0)


def _total(processes: Sequence[psutil.Process], measure: Callable[[psutil.Process], int]) -> int:
    """Sum of a figure over the processes that are still there."""
    total = 0
    for process in processes:
        try:
            total += measure(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


def write_settings(folder: Path, name: str, values: Mapping[str, Any]) -> list[str]:
    """Write a stage's settings file; the words of its command that name it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.yaml"
    publish_bytes(path, yaml.safe_dump(dict(values), sort_keys=True).encode())
    return ["--config", str(path)]


def flags(values: Mapping[str, Any]) -> list[str]:
    """A command line's words for `values`: {"num_train": 4} becomes --num-train 4."""
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def read_plan(program: str, path: Path, keys: Sequence[str], **places: Path) -> dict[str, Any]:
    """A YAML file with {name} replaced by the folder of that name.

    Args:
        keys: what must be there: SECTION or SECTION.KEY. No other section, and no other key beside 'settings'.

    Raises:
        SystemExit: the file cannot be read or is no such plan; the line names the file and the key.
    """
    try:
        text = path.read_text()
        for name, folder in places.items():
            text = text.replace(f"{{{name}}}", str(folder))
        plan = yaml.safe_load(text)
        _check_plan(plan, keys)
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise SystemExit(f"{program}: --plan {path}: {reason}") from None
    return plan


def _check_plan(plan: Any, keys: Sequence[str]) -> None:
    wanted = {"": sorted({key.split(".")[0] for key in keys})}
    for section in wanted[""]:
        wanted[section] = [key.partition(".")[2] for key in keys if key.startswith(f"{section}.")]
    for section, names in wanted.items():
        values, within = (plan[section], f"{section}: ") if section else (plan, "")
        if not isinstance(values, dict):
            raise ValueError(f"{within}expected a mapping of {'settings' if section else 'sections'}")
        given = [str(key) for key in values]
        for name in names:
            if name not in given:
                there = nearest(name, given).replace("did you mean", "there is").replace("?)", ")")
                raise ValueError(f"{within}no {name!r}{there}")
        closed = not section or "settings" in names
        if closed and (unknown := [key for key in given if key not in names]):
            raise ValueError(f"{within}unknown key {unknown[0]!r}{nearest(unknown[0], names)}")
        if "settings" in names and not isinstance(values["settings"], dict):
            raise ValueError(f"{within}settings: expected a mapping of settings")


def digest_of(stage: Stage, before: str) -> str:
    """What the result of a stage follows from: its command, its settings file and the stage before it."""
    text = json.dumps([stage.command, before])
    for word in stage.command:
        if word.endswith(".yaml"):
            text += Path(word).read_text()
    return hashlib.sha256(text.encode()).hexdigest()


def remove(paths: Sequence[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def read_journal(out: Path) -> dict[str, Any]:
    """What finished stages left in `out`: by name, their digest, seconds and peak memory (bytes)."""
    journal = out / "stages.json"
    return json.loads(journal.read_text()) if journal.exists() else {}


def run_stages(program: str, todo: Sequence[Stage], out: Path) -> Totals:
    """Run what is not done yet, in order; a stage that runs makes all later ones run.

    Raises:
        SystemExit: a stage failed; the line names it.
    """
    memory = PeakMemory()
    memory.start()
    done = read_journal(out)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if not sys.stderr.isatty():
        # A bar is for eyes: in a file it becomes a line of a thousand columns.
        environment["TQDM_DISABLE"] = "1"
    started, digest, ran = time.monotonic(), "", False
    for number, stage in enumerate(todo, start=1):
        digest = digest_of(stage, digest)
        title = f"[{number}/{len(todo)}] {stage.name}"
        whole = not stage.only_looks and all(path.exists() for path in stage.makes)
        if not ran and whole and done.get(stage.name, {}).get("digest") == digest:
            print(f"{title}: done before, {done[stage.name]['seconds']:.0f} s", flush=True)
            continue
        print(title, flush=True)
        if not ran and not stage.only_looks:
            # From here on nothing that an earlier start made counts any more.
            ran = True
            done = {earlier.name: done[earlier.name] for earlier in todo[: number - 1] if earlier.name in done}
            publish_json(out / "stages.json", done)
        remove(stage.makes)
        memory.mark()
        began = time.monotonic()
        code = subprocess.run(stage.command, cwd=ROOT, env=environment).returncode
        if code != 0:
            raise SystemExit(f"{program}: stage {stage.name!r} ended with exit code {code}: {' '.join(stage.command)}")
        done[stage.name] = {"digest": digest, "seconds": time.monotonic() - began, "peak_bytes": memory.since_mark}
        publish_json(out / "stages.json", done)
    return Totals(seconds=time.monotonic() - started, peak=memory.peak)
