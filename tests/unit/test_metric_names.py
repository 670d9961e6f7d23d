"""Every metric that the code logs stands in docs/metrics.md: whoever reads a run folder can look its names up."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles.algorithms.policy_losses import PolicyLoss, policy_metrics

ROOT = Path(__file__).resolve().parents[2]
_NAME = re.compile(r"(rollout|train|value|eval|time|idle|perf|sync|sft)/[a-z_0-9]+")


def documented() -> set[str]:
    """The names of the table's first column."""
    rows = [line.split("|")[1] for line in (ROOT / "docs" / "metrics.md").read_text().splitlines() if line[:1] == "|"]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def logged() -> Iterator[tuple[str, str]]:
    """(metric, file) of every literal metric name in the source."""
    for path in sorted(path for folder in ("miles", "examples") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAME.fullmatch(node.value):
                yield node.value, str(path.relative_to(ROOT))


def test_every_literal_name_is_documented() -> None:
    found = dict(logged())
    assert len(found) > 30
    assert {name: path for name, path in found.items() if name not in documented()} == {}


@pytest.mark.parametrize("objective", ["ppo", "gspo", "cispo", "sao_dis", "decoupled_ppo"])
def test_every_figure_of_a_policy_loss_is_documented(objective: str) -> None:
    dual = 3.0 if objective.endswith("ppo") else None
    loss = PolicyLoss(objective=objective, dual_clip=dual, kl_loss_coef=0.1)
    names = {f"train/{name}" for name in policy_metrics(dict.fromkeys(loss.metric_names, 1.0))}
    assert names - documented() == set()


def test_every_figure_of_an_evaluation_is_documented() -> None:
    """They are named after the set, so no literal shows them."""
    source = (ROOT / "miles" / "ray" / "rollout" / "manager.py").read_text()
    (body,) = re.findall(r"figures = \{\n(.*?)\n    \}", source, re.DOTALL)
    names = {f"eval/{name}" for name in re.findall(r'"([a-z_]+)":', body)}
    assert len(names) >= 6
    assert names - documented() == set()


def test_every_timed_stage_is_documented() -> None:
    from miles.ray.online import _STAGES

    assert {f"time/{stage}_s" for stage in _STAGES} - documented() == set()
