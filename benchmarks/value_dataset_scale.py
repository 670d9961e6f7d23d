"""Open and validate value data sets of growing size; compare with a loop of json.loads and with sha256sum.

    python benchmarks/value_dataset_scale.py [--rows 10000 100000 1000000] [--folder FOLDER] [--json FILE]

For each size: seconds and MB/s of `sha256sum`, of `for line in file: json.loads(line)`, of the first opening (hashed,
parsed and indexed) and of the next one (hashed; the index comes from its cache), in this order, each in a process of
its own, with the file in the page cache, imports aside. Processor seconds (of all processes) tell what a busy machine
hides. Memory is the peak of the proportional set sizes of the opening process and all its children together, sampled
every 100 ms. The data are made in a temporary folder and deleted.
"""

import argparse
import contextlib
import hashlib
import importlib
import json
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]


def random_tails(count: int, *, mean_tokens: int, seed: int) -> list[bytes]:
    """Rows without their id: a length around the mean, tokens of a vocabulary of 32,000, a fifth of them response."""
    rng = random.Random(seed)
    tails = []
    for number in range(count):
        length = rng.randint(mean_tokens // 4, 2 * mean_tokens - mean_tokens // 4)
        response = max(1, length // 5)
        row = {
            "tokens": [rng.randrange(32_000) for _ in range(length)],
            "response_length": response,
            "returns": [float(number % 2)] * response,
            "loss_mask": [int(rng.random() < 0.9) for _ in range(response - 1)] + [1],
        }
        tails.append(json.dumps(row, separators=(",", ":")).encode()[1:] + b"\n")
    return tails


def write_data_set(folder: Path, *, rows: int, mean_tokens: int) -> Path:
    """Write rows.jsonl and its manifest; ids are unique, the rest repeats every few thousand rows."""
    tails = random_tails(min(rows, 4096), mean_tokens=mean_tokens, seed=1)
    digest = hashlib.sha256()
    with (folder / "rows.jsonl").open("wb", buffering=1 << 22) as out:
        for number in range(rows):
            line = b'{"sample_id":"task-%d/attempt-0",' % number + tails[number % len(tails)]
            digest.update(line)
            out.write(line)
    manifest = {
        "schema": "miles.value-pretrain.v1",
        "objective": {},
        "train": {"path": "rows.jsonl", "sha256": digest.hexdigest(), "num_samples": rows},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder / "manifest.json"


def cpu_seconds() -> float:
    """Processor time of this process and of the children it waited for."""
    parts = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(part.ru_utime + part.ru_stime for part in parts)


def measure_json_loop(path: Path) -> dict[str, Any]:
    """What a plain reader does."""
    began, cpu, rows = time.perf_counter(), cpu_seconds(), 0
    with path.open("rb") as stream:
        for line in stream:
            rows += "tokens" in json.loads(line)
    return {"seconds": time.perf_counter() - began, "cpu_s": cpu_seconds() - cpu, "rows": rows}


def measure_open(manifest_path: Path) -> dict[str, Any]:
    """Open the train split, then read rows at random and plan batches."""
    importlib.import_module("miles.data.value_index")  # The first opening would import it.
    from miles.value_evaluation import select_mixed_label_batches
    from miles.value_pretraining import ValuePretrainDataset, load_value_pretrain_manifest

    manifest = load_value_pretrain_manifest(manifest_path)
    began, cpu = time.perf_counter(), cpu_seconds()
    dataset = ValuePretrainDataset(manifest.train, manifest.objective)
    taken = {"seconds": time.perf_counter() - began, "cpu_s": cpu_seconds() - cpu}
    result: dict[str, Any] = {**taken, "rows": len(dataset)}
    print(json.dumps(result), flush=True)
    sys.stdin.readline()  # Memory of the opening alone is taken until here.
    rng = random.Random(0)
    began = time.perf_counter()
    for _ in range(1000):
        dataset.get(rng.randrange(len(dataset)))
    result["get_us"] = (time.perf_counter() - began) * 1e3
    began = time.perf_counter()
    select_mixed_label_batches(dataset, global_batch_size=64, num_batches=8, seed=1)
    result["mixed_batches_s"] = time.perf_counter() - began
    return result


class PeakMemory:
    """Peak of the summed proportional set sizes of a process and its children."""

    def __init__(self, pid: int) -> None:
        self._root, self.peak, self._stop = psutil.Process(pid), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            total = 0
            with contextlib.suppress(psutil.Error):
                for process in [self._root, *self._root.children(recursive=True)]:
                    with contextlib.suppress(psutil.Error):
                        total += process.memory_full_info().pss
            self.peak = max(self.peak, total)

    def stop(self) -> int:
        self._stop.set()
        self._thread.join()
        return self.peak


def in_own_process(what: str, path: Path) -> dict[str, Any]:
    """Run one measurement in a fresh interpreter; `peak_bytes` is added for an opening."""
    with subprocess.Popen(
        [sys.executable, __file__, "--measure", what, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as child:
        assert child.stdout is not None and child.stdin is not None
        memory = PeakMemory(child.pid)
        try:
            first = json.loads(child.stdout.readline())
        finally:
            peak = memory.stop()
        child.stdin.write("\n")
        child.stdin.close()
        rest = child.stdout.read().strip()
    return {**first, **(json.loads(rest) if rest else {}), "peak_bytes": peak}


def sha256sum(path: Path) -> float:
    """Seconds of the system's own program."""
    began = time.perf_counter()
    subprocess.run(["sha256sum", str(path)], check=True, capture_output=True)
    return time.perf_counter() - began


def measure_size(rows: int, *, folder: Path, mean_tokens: int) -> dict[str, Any]:
    """All figures of one size."""
    manifest = write_data_set(folder, rows=rows, mean_tokens=mean_tokens)
    data = folder / "rows.jsonl"
    size = data.stat().st_size
    sha256sum(data)
    plain = sha256sum(data)
    loop = in_own_process("loop", data)
    first = in_own_process("open", manifest)
    cached = in_own_process("open", manifest)
    assert loop["rows"] == first["rows"] == cached["rows"] == rows
    index = folder / ".rows.jsonl.value-index"
    return {
        "rows": rows,
        "bytes": size,
        "sha256sum_s": plain,
        "json_loop_s": loop["seconds"],
        "json_cpu_s": loop["cpu_s"],
        "open_cpu_s": first["cpu_s"],
        "open_s": first["seconds"],
        "cached_s": cached["seconds"],
        "open_mb_s": size / first["seconds"] / 1e6,
        "times_faster_than_json": loop["seconds"] / first["seconds"],
        "cached_over_sha256sum": cached["seconds"] / plain,
        "peak_mb": first["peak_bytes"] / 1e6,
        "cached_peak_mb": cached["peak_bytes"] / 1e6,
        "allowed_mb": 300 + 64e-6 * rows,
        "index_bytes_per_row": index.stat().st_size / rows if index.exists() else float("nan"),
        "get_us": first["get_us"],
        "mixed_batches_s": first["mixed_batches_s"],
    }


def folders(parent: Path | None) -> Iterator[Path]:
    """A temporary folder per size, deleted before the next is made."""
    while True:
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            yield Path(folder)


COLUMNS = (
    ("rows", "rows", "{:,.0f}"),
    ("bytes", "MB", "{:,.0f}"),
    ("sha256sum_s", "sha256sum s", "{:.2f}"),
    ("json_loop_s", "json loop s", "{:.2f}"),
    ("json_cpu_s", "json cpu s", "{:.2f}"),
    ("open_s", "open s", "{:.2f}"),
    ("open_cpu_s", "open cpu s", "{:.2f}"),
    ("open_mb_s", "MB/s", "{:,.0f}"),
    ("times_faster_than_json", "x json", "{:.1f}"),
    ("cached_s", "cached s", "{:.2f}"),
    ("cached_over_sha256sum", "x sha256sum", "{:.2f}"),
    ("peak_mb", "peak MB", "{:.0f}"),
    ("allowed_mb", "of MB", "{:.0f}"),
    ("index_bytes_per_row", "index B/row", "{:.1f}"),
    ("get_us", "get us", "{:.0f}"),
    ("mixed_batches_s", "mixed s", "{:.2f}"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--mean-tokens", type=int, default=512)
    parser.add_argument("--folder", type=Path, default=None, help="where the data are made (default: temporary)")
    parser.add_argument("--json", type=Path, default=None, help="also write the figures here")
    parser.add_argument("--measure", nargs=2, metavar=("WHAT", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        what, path = options.measure
        sys.path.insert(0, str(ROOT))
        print(json.dumps(measure_json_loop(Path(path)) if what == "loop" else measure_open(Path(path))))
        return
    print("  ".join(f"{title:>11}" for _, title, _ in COLUMNS), flush=True)
    results = []
    for rows, folder in zip(options.rows, folders(options.folder), strict=False):
        results.append(measure_size(rows, folder=folder, mean_tokens=options.mean_tokens))
        figures = {**results[-1], "bytes": results[-1]["bytes"] / 1e6}
        print("  ".join(f"{form.format(figures[name]):>11}" for name, _, form in COLUMNS), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
