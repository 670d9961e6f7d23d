"""Whole programs as a user starts them; every process they leave behind is found by a mark in its environment."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from miles.utils.tracking_utils.tracking import NOT_REPRODUCED

ROOT = Path(__file__).resolve().parents[2]
MARK = "MILES_TEST_MARK"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole programs take their time on a busy machine."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(1200))


@dataclass
class Program:
    """A started program: `communicate` to wait for it, `kill` to end it without a word."""

    process: subprocess.Popen[str]
    mark: str
    outcome: tuple[str, str] | None = field(default=None)

    def finish(self, timeout_s: float) -> "Finished":
        out, err = self.process.communicate(timeout=timeout_s)
        return Finished(self.process.returncode, out, err, self.mark)

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.process.pid, how)

    def kill_everything(self) -> None:
        """End the program and all it started without a word, as a machine that loses its power does."""
        while left := processes_with(self.mark):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.communicate()


@dataclass
class Finished:
    code: int
    out: str
    err: str
    mark: str

    @property
    def last_line(self) -> str:
        """Last line of what the user reads: errors where there are some, else the output."""
        lines = (self.err if self.code else self.out).strip().splitlines()
        return lines[-1] if lines else ""


def processes_with(mark: str) -> dict[int, str]:
    """Command lines of the living processes that were started with this mark, zombies left out."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if f"{MARK}={mark}".encode() not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            if (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """A function that starts a program of the repository with flags; all are killed at the end of the test.

    `pause` names a file operation to halt before (see pause/sitecustomize.py); the file `paused` tells when.
    """
    programs: list[Program] = []

    def begin(program: str, *words: Any, pause: str | None = None, ray_address: str | None = None) -> Program:
        mark = uuid.uuid4().hex
        env = {**os.environ, "PYTHONPATH": str(ROOT), MARK: mark, "COLUMNS": "200"}
        if ray_address is not None:
            env["RAY_ADDRESS"] = ray_address
        if pause is not None:
            (tmp_path / "paused").unlink(missing_ok=True)
            env["PYTHONPATH"] = f"{Path(__file__).parent / 'pause'}{os.pathsep}{ROOT}"
            env |= {"MILES_TEST_PAUSE": pause, "MILES_TEST_PAUSED": str(tmp_path / "paused")}
        process = subprocess.Popen(
            [sys.executable, str(ROOT / program), *map(str, words)],
            cwd=tmp_path,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        programs.append(Program(process, mark))
        return programs[-1]

    yield begin
    for program in programs:
        if program.process.poll() is None:
            program.process.kill()
            program.process.wait()


@pytest.fixture
def run(start: Callable[..., Program]) -> Callable[..., Finished]:
    """A function that runs a program of the repository to its end."""

    def whole(program: str, *words: Any, timeout_s: float = 600.0, **how: Any) -> Finished:
        return start(program, *words, **how).finish(timeout_s)

    return whole


@pytest.fixture
def ray_cluster() -> Iterator[str]:
    """Address of a cluster of one node with two devices, started as README says and asking for the machine's token."""
    from miles.backends.sglang.ports import reserve_port

    with reserve_port() as reserved:
        port = reserved.port
    token = subprocess.run(
        [str(Path(sys.executable).with_name("ray")), "get-auth-token", "--generate"], capture_output=True, check=True
    )
    assert token.stdout.strip()
    mark = uuid.uuid4().hex
    # A short folder of its own: sockets lie in it, and other programs of this machine must not take it for theirs.
    scratch = tempfile.mkdtemp(prefix="ray-")
    words = ["start", "--head", "--block", f"--port={port}", "--num-cpus=4", "--num-gpus=0", f"--temp-dir={scratch}"]
    words += ["--include-dashboard=false", f"--object-store-memory={200 << 20}", '--resources={"miles_device": 2}']
    node = Program(
        subprocess.Popen(
            [str(Path(sys.executable).with_name("ray")), *words],
            env={**os.environ, MARK: mark, "RAY_AUTH_MODE": "token"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ),
        mark,
    )
    try:
        assert node.process.stdout is not None
        for line in node.process.stdout:
            if "--block" in line:
                break
        yield f"127.0.0.1:{port}"
    finally:
        node.kill_everything()
        shutil.rmtree(scratch, ignore_errors=True)


@pytest.fixture
def assert_no_process_left() -> Callable[..., None]:
    """A function that waits until nothing of a started program is alive."""

    def check(mark: str, *, within_s: float = 30.0) -> None:
        deadline = time.monotonic() + within_s
        while (left := processes_with(mark)) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert not left, f"{len(left)} processes left: {list(left.values())}"

    return check


@pytest.fixture
def read_metrics() -> Callable[[Path], list[dict[str, Any]]]:
    def read(run_dir: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]

    return read


@pytest.fixture
def figures_of(read_metrics: Callable[[Path], list[dict[str, Any]]]) -> Callable[..., list[dict[str, Any]]]:
    """A function that reads what must be the same in two runs from a run folder, of these stages or of all."""

    def read(run_dir: Path, *stages: str) -> list[dict[str, Any]]:
        lines = [line for line in read_metrics(run_dir) if not stages or line["stage"] in stages]
        kept = [{key: value for key, value in line.items() if not key.startswith(NOT_REPRODUCED)} for line in lines]
        return [line for line in kept if line.keys() - {"step", "stage"}]

    return read


@pytest.fixture
def wait_for() -> Callable[..., None]:
    """A function that waits until a condition holds, while a program runs."""

    def wait(condition: Callable[[], bool], program: Program, *, within_s: float = 600.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert program.process.poll() is None, program.process.communicate()[1][-2000:]
            assert time.monotonic() < deadline, "the condition did not come true in time"
            time.sleep(0.05)

    return wait


REWARD = """\
import time

def score(sample):
    return float(sample.response[:1].isdigit())

def keep(samples):
    return sum(sum(sample.response_tokens) for sample in samples) % 4 > 0

def trying(sample):
    if sample.rollout_id == 0 and sample.index == 3:
        time.sleep(60)
    if sample.rollout_id == 0 and sample.index == 5:
        raise OSError("the judge hung up")
    return score(sample)
"""


@pytest.fixture(scope="session")
def rl_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Prompts for training and evaluation, and a reward file: 1 where a response begins with a digit.

    The file holds more: `keep`, a filter that takes about three of four groups, and `trying`, a reward that hangs on
    sample 3 of the first rollout and fails on sample 5.
    """
    folder = tmp_path_factory.mktemp("rl")
    for name, count in (("train", 24), ("heldout", 8)):
        rows = [{"prompt": f"{i} + {i + 1} =", "label": str(2 * i + 1)} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    return {"train": folder / "train.jsonl", "heldout": folder / "heldout.jsonl", "reward": folder / "reward.py"}


@pytest.fixture(scope="session")
def online_flags(tiny_hf_model: Path, rl_files: dict[str, Path]) -> list[str]:
    """Flags of a small online run, without --run-dir."""
    flags = {
        "hf-checkpoint": tiny_hf_model,
        "prompt-data": rl_files["train"],
        "eval-prompt-data": rl_files["heldout"],
        "eval-interval": 2,
        "custom-rm-path": f"{rl_files['reward']}:score",
        "num-rollout": 4,
        "rollout-batch-size": 8,
        "n-samples-per-prompt": 2,
        "rollout-max-response-len": 4,
        "micro-batch-size": 4,
        "save-interval": 2,
        "lr": 1e-3,
        "critic-lr": 1e-3,
        "device": "cpu",
    }
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="session")
def without() -> Callable[..., list[Any]]:
    """A function that gives the words of a command line without some flags and their values."""

    def drop(words: list[Any], *flags: str) -> list[Any]:
        gone = {number for flag in flags for at in [words.index(flag)] for number in (at, at + 1)}
        return [word for number, word in enumerate(words) if number not in gone]

    return drop


@pytest.fixture(scope="session")
def replay_flags(online_flags: list[str], without: Callable[..., list[Any]]) -> Callable[[Path], list[Any]]:
    """A function that gives the flags of a small run on the rollouts of a folder: it starts no engine."""
    flags = without(online_flags, "--prompt-data", "--eval-prompt-data", "--eval-interval", "--custom-rm-path")
    return lambda rollouts: [*flags, "--load-rollouts", rollouts]


@pytest.fixture(scope="session")
def kept_rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four rollouts of 8 groups of 2 samples that no engine has sampled; the reward is 1 for an even first token."""
    import random

    folder, dice = tmp_path_factory.mktemp("kept"), random.Random(0)
    for rollout_id in range(4):
        rows = []
        for index in range(16 * rollout_id, 16 * (rollout_id + 1)):
            length = dice.randint(1, 4)
            response = [dice.randint(3, 45) for _ in range(length)]
            row = {
                "index": index,
                "group_index": index // 2,
                "rollout_id": rollout_id,
                "prompt": "2 + 2 =",
                "tokens": [5, 13, 3 + index // 2 % 10, *response],
                "response_length": length,
                "reward": float(response[0] % 2 == 0),
                "loss_mask": [1] * length,
                "rollout_log_probs": [-4.0] * length,
                "status": "completed",
                "weight_versions": [str(rollout_id + 1)],
            }
            rows.append(json.dumps(row) + "\n")
        (folder / f"rollout_{rollout_id:06d}.jsonl").write_text("".join(rows))
    return folder


def write_value_rows(path: Path, *, count: int, offset: int) -> dict[str, Any]:
    """Rows whose return follows from their first token, so that a critic can learn them; the spec of the file."""
    import hashlib

    lines = []
    for number in range(offset, offset + count):
        label = number % 2
        # The last token keeps the prompts of one file apart from those of another.
        prompt = [3 + label, 5 + number % 7, 3 + number % 10, 15 + offset % 7]
        response = [4 + number % 9] * (1 + number % 3)
        row = {
            "sample_id": f"row-{number}",
            "tokens": prompt + response,
            "response_length": len(response),
            "returns": [float(label)] * len(response),
            "loss_mask": [1] * len(response),
        }
        lines.append(json.dumps(row) + "\n")
    data = "".join(lines).encode()
    path.write_bytes(data)
    return {"path": path.name, "sha256": hashlib.sha256(data).hexdigest(), "num_samples": count}


@pytest.fixture(scope="session")
def value_manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A manifest of 64 training and 32 held-out rows, written without the code under test."""
    folder = tmp_path_factory.mktemp("value_data")
    manifest = {
        "schema": "miles.value-pretrain.v1",
        "train": write_value_rows(folder / "train.jsonl", count=64, offset=0),
        "heldout": write_value_rows(folder / "heldout.jsonl", count=32, offset=1000),
        "objective": {"loss_type": "classification", "num_bins": 11},
    }
    path = folder / "manifest.json"
    path.write_text(json.dumps(manifest))
    return path


@pytest.fixture(scope="session")
def value_flags(tiny_hf_model: Path, value_manifest: Path) -> list[str]:
    """Flags of a small value pretraining on two tensor-parallel ranks, without --critic-save."""
    flags = {
        "hf-checkpoint": tiny_hf_model,
        "value-pretrain-manifest": value_manifest,
        "value-pretrain-epochs": 5,
        "global-batch-size": 16,
        "micro-batch-size": 8,
        "critic-num-gpus-per-node": 2,
        "tensor-model-parallel-size": 2,
        "lr": 3e-3,
        "device": "cpu",
    }
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]
