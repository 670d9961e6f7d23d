"""The gate of value pretraining as the program runs it, on a group that answers without a model."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miles.config import Args
from miles.ray import offline
from miles.value_evaluation import build_rank_report
from miles.value_pretraining import (
    ResumePoint,
    ValuePretrainDataset,
    ValuePretrainPlan,
    load_value_pretrain_manifest,
)


class BiasedCritic:
    """Knows every return and answers ten more."""

    async def evaluate_critic(self, number: int, data: dict[str, Any]) -> list[dict[str, Any]]:
        batch = data["data_ref"]
        return [
            build_rank_report(
                dp_rank=0,
                sample_indices=batch["sample_indices"],
                values=[[label + 10.0 for label in row] for row in batch["returns"]],
                returns=batch["returns"],
                loss_masks=batch["loss_masks"],
            )
        ]


@pytest.mark.parametrize(("bound", "passes"), [(None, True), (20.0, True), (0.5, False)])
def test_evaluation_critic_off_by_a_constant_is_refused_by_the_bias_gate_alone(
    bound: float | None,
    passes: bool,
    make_manifest: Callable[..., Path],
    value_row: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # faults.md row 68: V = R + 10 explains all variance
    rows = [value_row(number, label=float(number % 2)) for number in range(8)]
    manifest = load_value_pretrain_manifest(str(make_manifest(rows, heldout=rows)), expected_sha256=None)
    assert manifest.heldout is not None
    dataset = ValuePretrainDataset(manifest.heldout, manifest.objective)
    resume = ResumePoint({"completed_steps": 5}, "c" * 64)
    plan = ValuePretrainPlan(manifest, dataset, resume, 1, 5, ((0, 1, 2, 3), (4, 5, 6, 7)))
    (tmp_path / "config.json").write_text(
        json.dumps({"vocab_size": 100, "hidden_size": 8, "max_position_embeddings": 64})
    )
    report = tmp_path / "report.json"
    args = Args.build(
        value_pretrain_eval_report=str(report),
        value_pretrain_eval_split="heldout",
        value_gate_max_bias=bound,
        critic_load=str(tmp_path / "critic"),
        hf_checkpoint=str(tmp_path),
        global_batch_size=4,
    )
    monkeypatch.setattr(offline, "split_train_data_by_dp", lambda args, columns, *, dp_size: columns)
    monkeypatch.setattr(offline, "_record_chain", lambda args, **made: None)
    tracker: Any = SimpleNamespace(log=lambda *line: None)
    group: Any = BiasedCritic()
    if passes:
        asyncio.run(offline.evaluate(args, plan, group, 5, tracker))
        assert "gate passed" in capsys.readouterr().out
    else:
        with pytest.raises(RuntimeError, match=r"mean residual \(.* exceeds --value-gate-max-bias 0.5"):
            asyncio.run(offline.evaluate(args, plan, group, 5, tracker))
    found = json.loads(report.read_text())
    assert found["passed"] is passes
    assert found["aggregate"]["token_weighted"]["metrics"]["explained_variance"] == 1.0
