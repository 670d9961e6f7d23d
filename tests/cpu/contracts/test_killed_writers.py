"""A writer killed at any time leaves the old artifact or the new one, whole."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from miles.value_pretraining import (
    ValuePretrainDataset,
    contract_sha256,
    load_value_pretrain_contract,
    load_value_pretrain_manifest,
)

TOOL = Path(__file__).parents[3] / "tools" / "build_value_dataset.py"


def write_until_killed(code: str, path: Path, *, after_s: float) -> None:
    """SIGKILL a program that writes to `path` without end, `after_s` seconds after it says that it has begun."""
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(after_s)
        child.send_signal(signal.SIGKILL)


def test_publish_bytes_killed_at_any_time_leaves_a_whole_file(tmp_path):
    path = tmp_path / "f"
    code = (
        "import sys; from miles.contracts.publish import publish_bytes\n"
        "publish_bytes(sys.argv[1], bytes([0]) * 400_000); print('ready', flush=True)\n"
        "while True:\n"
        "    for i in range(256): publish_bytes(sys.argv[1], bytes([i]) * 400_000)\n"
    )
    for attempt in range(4):
        write_until_killed(code, path, after_s=0.01 + 0.017 * attempt)
        data = path.read_bytes()
        assert len(data) == 400_000
        assert len(set(data)) == 1


def test_publish_folder_replaced_without_end_and_killed_is_always_there_and_whole(tmp_path):
    code = (
        "import sys; from pathlib import Path; from miles.contracts.publish import publish_folder\n"
        "root = Path(sys.argv[1])\n"
        "for i in range(10**9):\n"
        "    tmp = root / f'.tmp{i}'; tmp.mkdir()\n"
        "    for name in 'abc': (tmp / name).write_text(str(i))\n"
        "    publish_folder(tmp, root / 'final', replace=True)\n"
        "    if i == 0: print('ready', flush=True)\n"
    )
    for attempt in range(4):
        root = tmp_path / str(attempt)
        root.mkdir()
        write_until_killed(code, root, after_s=0.02 + 0.013 * attempt)
        assert len({(root / "final" / name).read_text() for name in "abc"}) == 1


def test_contract_writer_killed_at_any_time_leaves_a_whole_contract(tmp_path):
    code = (
        "import sys; from pathlib import Path; from miles.value_pretraining import *\n"
        "m = ValuePretrainManifest(Path('m'), 'a' * 64, ValueDatasetSpec(Path('t'), 'b' * 64, 9), None, "
        "ValueObjective())\n"
        "for step in range(1, 10**9):\n"
        "    write_value_pretrain_contract(sys.argv[1], manifest=m, completed_steps=step, model_identity='toy', "
        "seed=1, global_batch_size=2)\n"
        "    if step == 1: print('ready', flush=True)\n"
    )
    for attempt in range(3):
        write_until_killed(code, tmp_path, after_s=0.01 + 0.013 * attempt)
        contract = load_value_pretrain_contract(tmp_path)
        link = tmp_path / "value_pretrain_links" / f"{contract_sha256(tmp_path)}.json"
        assert json.loads(link.read_bytes())["completed_steps"] == contract["completed_steps"] >= 1


def test_tool_killed_at_any_time_leaves_all_or_nothing(tmp_path):
    rollouts = tmp_path / "rollouts.jsonl"
    rows = [
        {
            "index": i,
            "group_index": i // 2,
            "rollout_id": 0,
            "prompt": f"problem {i // 2}",
            "tokens": [1, 100 + i // 2, 7, 8, 200 + i],
            "response_length": 3,
            "response": "text",
            "label": None,
            "reward": float(i % 2),
            "loss_mask": [1, 0, 1],
            "rollout_log_probs": [-0.1, 0.0, -0.2],
            "status": "completed",
            "weight_versions": ["0"],
            "metadata": {},
        }
        for i in range(20)
    ]
    rollouts.write_text("".join(json.dumps(row) + "\n" for row in rows) * 400)
    whole = 0
    for attempt in range(3):
        out = tmp_path / f"out{attempt}"
        child = subprocess.Popen([sys.executable, str(TOOL), "--rollouts", str(rollouts), "--out", str(out)],
                                 stdout=subprocess.DEVNULL)  # fmt: skip
        deadline = time.monotonic() + 20
        # Kill once writing has begun, each time a little later.
        while time.monotonic() < deadline and child.poll() is None and not list(tmp_path.glob(f".out{attempt}.*")):
            time.sleep(0.002)
        time.sleep(0.1 * attempt)
        child.send_signal(signal.SIGKILL)
        child.wait()
        if out.exists():
            whole += 1
            manifest = load_value_pretrain_manifest(out / "manifest.json")
            assert len(ValuePretrainDataset(manifest.train, manifest.objective)) == manifest.train.num_samples
    assert whole < 3
