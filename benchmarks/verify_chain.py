"""Speed of `miles verify` on a critic of a given size: MB/s of the whole walk, against one thread that only hashes.

python benchmarks/verify_chain.py --megabytes 2000 --files 8
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from miles.contracts.artifact import write_checkpoint_manifest
from miles.contracts.canonical import sha256_file
from miles.contracts.chain import first_broken, iteration_folder, verify_chain
from miles.value_pretraining import load_value_pretrain_manifest, write_value_pretrain_contract


def build(root: Path, *, megabytes: int, files: int, data_megabytes: int) -> Path:
    """A critic folder of random shards with its contract, and the data set it speaks of."""
    row = {"tokens": [7] * 512, "response_length": 256, "returns": [1.0] * 256, "loss_mask": [1] * 256}
    with (root / "train.jsonl").open("w") as stream:
        rows = 0
        while stream.tell() < data_megabytes * 1_000_000:
            stream.write(json.dumps({"sample_id": str(rows), **row}) + "\n")
            rows += 1
    train = {"path": "train.jsonl", "sha256": sha256_file(root / "train.jsonl"), "num_samples": rows}
    manifest = {"schema": "miles.value-pretrain.v1", "objective": {}, "train": train}
    (root / "manifest.json").write_text(json.dumps(manifest))
    folder = iteration_folder(root / "critic", 1)
    folder.mkdir(parents=True)
    for number in range(files):
        with (folder / f"__{number}_0.distcp").open("wb") as stream:
            for _ in range(megabytes // files):
                stream.write(os.urandom(1_000_000))
    write_checkpoint_manifest(folder, iteration=1, role="critic")
    write_value_pretrain_contract(
        root / "critic",
        manifest=load_value_pretrain_manifest(root / "manifest.json"),
        completed_steps=1,
        model_identity="benchmark",
        seed=1,
        global_batch_size=1,
    )
    return root / "critic"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=2000, help="size of the checkpoint")
    parser.add_argument("--data-megabytes", type=int, default=500, help="size of the training data")
    parser.add_argument("--files", type=int, default=8, help="shards of the checkpoint")
    parser.add_argument("--folder", help="where to build it (default: the system's temporary folder)")
    ns = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=ns.folder) as folder:
        critic = build(Path(folder), megabytes=ns.megabytes, files=ns.files, data_megabytes=ns.data_megabytes)
        paths = [path for path in Path(folder).rglob("*") if path.suffix in (".distcp", ".jsonl")]
        size = sum(path.stat().st_size for path in paths) / 1e6
        for name, work in (
            ("one thread that hashes", lambda: [sha256_file(path) for path in paths]),
            ("miles verify", lambda: first_broken(verify_chain(critic))),
        ):
            wall, cpu = time.perf_counter(), time.process_time()
            outcome = work()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            assert name != "miles verify" or outcome is None, outcome
            print(f"{name:24} {size:,.0f} MB in {wall:.2f} s = {size / wall:,.0f} MB/s ({cpu:.2f} s of CPU)")


if __name__ == "__main__":
    main()
