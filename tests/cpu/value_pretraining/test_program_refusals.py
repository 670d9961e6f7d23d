"""What `train_value.py` refuses, run as the program it is: in one line, before Ray, torch or Megatron is loaded.

All command lines run in one child process, one after the other.
"""

import fcntl
import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles.config import Args
from miles.contracts.artifact import write_checkpoint_manifest
from miles.contracts.canonical import canonical_json_bytes
from miles.utils.tracking_utils.run_folder import record_start

ROOT = Path(__file__).resolve().parents[3]
HEAVY = ("ray", "torch", "megatron", "transformers", "sglang")

CHILD = """
import contextlib, io, json, runpy, sys
program, cases, heavy = sys.argv[1], json.load(sys.stdin), sys.argv[2].split(",")
answers = {}
for name, words in cases.items():
    sys.argv = [program, *words]
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            runpy.run_path(program, run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code
    text = errors.getvalue() + (code if isinstance(code, str) else "")
    answers[name] = [code if isinstance(code, int) else 1, text, [m for m in heavy if m in sys.modules]]
json.dump(answers, sys.stdout)
"""


def row(number: int, label: float, **changes) -> dict:
    fields = {
        "sample_id": f"sample-{number}",
        "tokens": [1, 2, 3, 4],
        "response_length": 2,
        "returns": [label, label],
    }
    return {**fields, **changes}


def lines(rows) -> bytes:
    return b"".join(json.dumps(r).encode() + b"\n" for r in rows)


def write_manifest(folder: Path, train: bytes, heldout: bytes | None = None, *, rows=None, **changes) -> Path:
    folder.mkdir()
    manifest = {"schema": "miles.value-pretrain.v1", "objective": {}}
    for name, data in (("train", train), ("heldout", heldout)):
        if data is not None:
            (folder / f"{name}.jsonl").write_bytes(data)
            digest = hashlib.sha256(data).hexdigest()
            count = sum(bool(line.strip()) for line in data.split(b"\n"))
            manifest[name] = {"path": f"{name}.jsonl", "sha256": digest, "num_samples": rows or count}
    (folder / "manifest.json").write_text(json.dumps({**manifest, **changes}))
    return folder / "manifest.json"


def write_contract(folder: Path, manifest: Path, **changes) -> Path:
    raw = json.loads(manifest.read_text())
    contract = {
        "schema": "miles.value-pretrain-checkpoint.v1",
        "source_manifest_sha256": hashlib.sha256(manifest.read_bytes()).hexdigest(),
        "train_dataset_sha256": raw["train"]["sha256"],
        "objective": {
            "loss_type": "classification",
            "num_bins": 51,
            "reward_range": [0.0, 1.0],
            "target_type": "hl_gauss",
            "hl_gauss_sigma_ratio": 0.75,
        },
        "batch_plan": {"seed": 7, "global_batch_size": 4, "drop_incomplete_batch": True},
        "completed_steps": 2,
        "model_identity": "toy",
    }
    folder.mkdir()
    (folder / "value_pretrain_contract.json").write_bytes(canonical_json_bytes({**contract, **changes}))
    return folder


def write_checkpoint(critic: Path, iteration: int) -> Path:
    folder = critic / f"iter_{iteration:07d}"
    folder.mkdir()
    (folder / "weights").write_bytes(b"w")
    write_checkpoint_manifest(folder, iteration=iteration)
    return critic


def write_model(folder: Path) -> Path:
    folder.mkdir()
    config = {"model_type": "llama", "vocab_size": 8, "num_attention_heads": 4, "num_key_value_heads": 4}
    config |= {"intermediate_size": 16, "num_hidden_layers": 4, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps({"w": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(32))
    (folder / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<eos>"}]})
    )
    return folder


GOOD = [row(i, float(i % 2)) for i in range(8)]
HELDOUT = lines(row(100 + i, float(i % 2), tokens=[2, 1, 3, 4]) for i in range(8))

BAD_DATA = {
    "bad row": (
        lines([GOOD[0], row(1, 0.0, response_length=9), *GOOD[2:]]),
        "train.jsonl:2: response_length 9 must leave",
    ),
    "return outside": (lines([*GOOD[:3], row(3, 2.0)]), "train.jsonl:4: classification returns must stay inside"),
    "no target": (lines([GOOD[0], row(1, 0.0, loss_mask=[0, 0]), *GOOD[2:]]), "train.jsonl:2: loss_mask must select"),
    "another tokenizer": (
        lines([*GOOD[:3], row(3, 1.0, tokens=[1, 2, 9, 4]), *GOOD[4:]]),
        "train.jsonl:4: sample 'sample-3' has token id 9, the model",
    ),
    "duplicate id": (lines([*GOOD, GOOD[2]]), "train.jsonl:9: duplicate sample_id 'sample-2', first at line 3"),
    "not UTF-8": (
        lines(GOOD).replace(b"sample-5", b"sample-\xff"),
        "train.jsonl:6: invalid JSON: not UTF-8: byte 0xff",
    ),
    "NaN": (lines(GOOD).replace(b"[0.0, 0.0]", b"[0.0, NaN]", 1), "train.jsonl:1: invalid JSON: NaN is not valid"),
    "Infinity": (lines(GOOD).replace(b"[1.0, ", b"[Infinity, ", 1), "train.jsonl:2: invalid JSON: Infinity is not"),
    "duplicate key": (
        lines(GOOD).replace(b'"tokens"', b'"tokens": [1, 2, 3], "tokens"', 1),
        "train.jsonl:1: invalid JSON: duplicate key 'tokens'",
    ),
    "byte-order mark": (b"\xef\xbb\xbf" + lines(GOOD), "train.jsonl:1: starts with a byte-order mark"),
    "truncated": (lines(GOOD)[:-20], "train.jsonl:8: invalid JSON: "),
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> Iterator[dict[str, tuple[list[str], str]]]:
    """Name of a mistake -> (flags on top of the good ones, what the program must say)."""
    at = tmp_path_factory.mktemp("refusals")
    good = write_manifest(at / "good", lines(GOOD), HELDOUT)
    leaking = write_manifest(at / "leaking", lines(GOOD), lines(row(100 + i, float(i % 2)) for i in range(8)))
    contract = write_contract(at / "contract", good)
    (at / "report.json").write_text("{}")
    (at / "uncontracted").mkdir()
    (at / "uncontracted" / "latest").write_text("")

    def manifest(name, *words, **changes):
        return ["--value-pretrain-manifest", str(write_manifest(at / name, lines(GOOD), **changes)), *words]

    def resume(name, **changes):
        return ["--critic-load", str(write_contract(at / name, good, **changes))]

    def judge(*words, load=contract):
        report = str(at / "new_report.json")
        flags = ["--value-pretrain-eval-only", "--value-pretrain-eval-num-batches", "2"]
        return [*flags, "--value-pretrain-eval-report", report, "--critic-load", str(load), *words]

    def data(name, content, **changes):
        return ["--value-pretrain-manifest", str(write_manifest(at / name, content, HELDOUT, **changes))]

    other_run, held = at / "other_run", at / "held"
    other_run.mkdir()
    record_start(Args.build(run_dir=str(other_run)), entry="train")
    held.mkdir()
    lock = os.open(held / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    holder = "process 7 on elsewhere"
    os.write(lock, holder.encode())

    changed = data("changed", lines(GOOD))
    (at / "changed" / "train.jsonl").write_bytes(lines(GOOD).replace(b"sample-3", b"sample-X"))
    gone = data("gone", lines(GOOD))
    (at / "gone" / "train.jsonl").unlink()
    other = {"loss_type": "mse"}
    plan = {"seed": 7, "global_batch_size": 8, "drop_incomplete_batch": True}
    one_label = lines(row(i, 1.0) for i in range(8))

    found = {
        "no manifest": (["--value-pretrain-manifest", str(at / "nowhere.json")], "manifest does not exist"),
        "another backend": (["--train-backend", "fsdp"], "currently requires --train-backend megatron"),
        "manifest pin": (["--value-pretrain-manifest-sha256", "0" * 64], "manifest SHA-256 mismatch: expected 0000"),
        "manifest schema": (manifest("schema", schema="v0"), "manifest.schema must be 'miles.value-pretrain.v1'"),
        "objective": (manifest("objective", objective={"num_bins": 1}), "objective.num_bins must be an integer of"),
        "data gone": (gone, "dataset does not exist"),
        "data changed": (changed, "dataset SHA-256 mismatch for"),
        **{name: (data(name.replace(" ", "_"), content), message) for name, (content, message) in BAD_DATA.items()},
        "row count": (data("count", lines(GOOD), rows=9), "dataset row-count mismatch for"),
        "canary over a contract": (
            ["--value-pretrain-canary-one-step", "--critic-save", str(contract)],
            "canary output already contains a production contract",
        ),
        "start over a contract": (
            ["--critic-save", str(contract)],
            "already holds a critic with a contract, which would be overwritten: continue it with "
            f"--critic-load {contract}",
        ),
        "another critic over a contract": (
            [*resume("c9"), "--critic-save", str(contract)],
            "already holds a critic with a contract, which would be overwritten",
        ),
        "resumed manifest": (resume("c1", source_manifest_sha256="0" * 64), "different value-pretraining manifest"),
        "resumed data": (resume("c2", train_dataset_sha256="0" * 64), "different value-pretraining dataset"),
        "resumed objective": (
            resume("c3", objective={**json.loads((contract / "value_pretrain_contract.json").read_text())["objective"],
                                    **other}),
            "different value objective",
        ),
        "resumed plan": (resume("c4", batch_plan=plan), "different deterministic batch plan"),
        "past the plan": (resume("c5", completed_steps=3), "checkpoint step 3 exceeds the 2-step batch plan"),
        "nothing left": (resume("c6", completed_steps=2), "no step is left: the checkpoint already holds all 2 steps"),
        "no contract": (judge(load=at / "uncontracted"), "requires a contracted value checkpoint"),
        "contract pin": (
            judge("--critic-value-pretrain-contract-sha256", "0" * 64),
            "checkpoint contract SHA-256 mismatch: expected 0000",
        ),
        "no held-out split": (
            [*manifest("train_only"), *judge()][:2] + judge(load=write_contract(
                at / "c7", at / "train_only" / "manifest.json")),
            "manifest has no heldout split",
        ),
        "report exists": (
            judge("--value-pretrain-eval-report", str(at / "report.json")),
            "report.json exists already and is never replaced",
        ),
        "batches overlap": (
            judge("--value-pretrain-eval-num-batches", "3"),
            "requires disjoint rows: 3 batches of 4 need 12, the split has 8",
        ),
        "one label": (
            [
                *("--value-pretrain-manifest", str(write_manifest(at / "one", lines(GOOD), one_label))),
                *judge(load=write_contract(at / "c8", at / "one" / "manifest.json")),
            ],
            "needs rows of two distinct labels, the split has only 1",
        ),
        # faults.md row 69: the rows of both splits begin with the same prompt
        **{
            name: (
                ["--value-pretrain-manifest", str(leaking), *words],
                f"{leaking.parent / 'heldout.jsonl'}:1: leaking prompt: {leaking.parent / 'train.jsonl'}:1 trains on",
            )
            for name, words in (
                ("leaking prompt", []),
                ("leaking prompt judged", judge(load=write_checkpoint(write_contract(at / "c10", leaking), 2))),
            )
        },
        "devices": (["--tensor-model-parallel-size", "4"], "critic: 2 devices (--critic-num-nodes x --crit"),
        "global batch": (["--global-batch-size", "3"], "--global-batch-size 3 is not divisible by the critic's data"),
        "micro-batch": (["--micro-batch-size", "4"], "the critic's local batch 2 (--global-batch-size 4 over"),
        "token budget": (
            ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "3"],
            "--max-tokens-per-gpu 3 cannot hold the longest row of",
        ),
        "no checkpoint": (
            ["--critic-load", str(at / "good")],
            f"--critic-load {at / 'good'}: holds no checkpoint: there is no file 'latest'",
        ),
        "run folder of data": (["--run-dir", str(at / "good")], "holds other things than a run"),
        "run folder of train.py": (["--run-dir", str(other_run)], "holds a run of train.py; name another folder"),
        "run folder held": (["--run-dir", str(held)], f"--run-dir {held} is being written by {holder}"),
        "critic folder held": (["--critic-save", str(held)], f"--critic-save {held} is being written by {holder}"),
        "seed": (["--seed", "9" * 20], "--seed: must be less than 4294967296, got '9999"),
        "too few rows": (["--global-batch-size", "16"], "at least one complete global batch: 8 rows"),
    }  # fmt: skip
    flags = {
        "hf-checkpoint": write_model(at / "model"),
        "value-pretrain-manifest": good,
        "value-pretrain-epochs": 1,
        "global-batch-size": 4,
        "micro-batch-size": 2,
        "critic-num-gpus-per-node": 2,
        "critic-save": at / "critic",
        "run-dir": at / "run",
        "seed": 7,
        "device": "cpu",
    }

    def base(words):
        # Flags that have no effect are warned of.
        unread = ("critic-save", "value-pretrain-epochs") if "--value-pretrain-eval-only" in words else ()
        unread += ("micro-batch-size",) if "--use-dynamic-batch-size" in words else ()
        return [word for name, value in flags.items() if name not in unread for word in (f"--{name}", str(value))]

    yield {name: (each_once([*base(words), *words]), message) for name, (words, message) in found.items()}
    os.close(lock)


def each_once(words):
    """The words with the last of each flag alone: one that is given twice is warned of."""
    given = {}
    for word in map(str, words):
        if word.startswith("--"):
            given.pop(word, None)
            given[word] = flag = [word]
        else:
            flag.append(word)
    return [word for flag in given.values() for word in flag]


@pytest.fixture(scope="module")
def answers(cases) -> dict[str, list]:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(ROOT / "train_value.py"), ",".join(HEAVY)],
        input=json.dumps({name: words for name, (words, _) in cases.items()}),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return json.loads(child.stdout)


NAMES = [
    *("no manifest", "another backend", "manifest pin", "manifest schema", "objective", "data gone", "data changed"),
    *(*BAD_DATA, "row count", "canary over a contract", "start over a contract", "another critic over a contract"),
    *("resumed manifest", "resumed data", "resumed objective"),
    *("resumed plan", "past the plan", "nothing left", "no contract", "contract pin", "no held-out split"),
    *("report exists", "batches overlap", "one label", "devices", "global batch", "micro-batch", "too few rows"),
    *("token budget", "no checkpoint", "run folder of data", "run folder of train.py", "run folder held"),
    *("critic folder held", "seed", "leaking prompt", "leaking prompt judged"),
]


def test_every_mistake_has_a_test(cases):
    assert sorted(cases) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_program_refuses_in_one_line_before_anything_heavy_is_loaded(cases, answers, name):
    code, text, heavy = answers[name]
    assert cases[name][1] in text
    assert code in (1, 2)
    assert len(text.strip().splitlines()) == 1, text
    assert text.startswith("train_value.py: ")
    assert heavy == []


def test_refused_runs_leave_nothing(cases, answers):
    folder = Path(cases["devices"][0][cases["devices"][0].index("--run-dir") + 1]).parent
    assert len(answers) == len(cases)
    assert not (folder / "run").exists()
    assert not (folder / "critic").exists()
