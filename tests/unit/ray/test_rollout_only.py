"""Sampling alone, interrupted and gone on with: the same rollouts, to the byte, as without the interruption."""

import asyncio
import inspect
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miles.config import Args
from miles.data.prompts import PromptSource
from miles.data.sample import Sample, SampleStatus
from miles.ray import rollout_only
from miles.ray.rollout.manager import RolloutManager
from miles.rollout.filters import nonzero_reward_std
from miles.rollout.groups import GroupSource
from miles.rollout.preflight import kept_rollout_state
from miles.utils.tracking_utils.tracking import Tracker


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A manager sets logging up for its process, which here is that of all tests."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


async def differ(group: list[Sample]) -> bool:
    return nonzero_reward_std(group)


class Characters:
    """A tokenizer of character codes."""

    chat_template = None
    name_or_path = "characters"

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(c) for c in text] for text in texts]}


class EnginelessManager(RolloutManager):
    """The manager with samples that follow from rollout and index alone, as seeded ones do."""

    dies_after = -1
    """The rollout that is kept, but not counted any more."""

    async def start(self) -> list[str]:
        assert self._args.prompt_data is not None
        prompts = PromptSource(self._args.prompt_data, tokenizer=Characters(), shuffle=True, seed=3)
        self._source, self._keep = GroupSource(prompts, samples_per_prompt=2), differ
        self._pool: Any = SimpleNamespace(busy_seconds=lambda: [0.0], engines=[])
        self._done = -1
        return []

    async def stop(self) -> None:
        pass

    async def next_lost_engine(self) -> Any:
        await asyncio.Event().wait()

    async def generate(self, rollout_id: int) -> dict[str, Any]:
        self._done = rollout_id
        return await super().generate(rollout_id)

    async def _run(self, samples: list[Sample], *, rollout_id: int, sampling: Any = None) -> None:
        for sample in samples:
            sample.append_response_tokens([7 + rollout_id, sample.index], log_probs=[-1.0, -0.5])
            sample.status = SampleStatus.COMPLETED
            sample.reward = float(sample.index % 2 if int(sample.prompt) % 3 else 1)

    def state_dict(self) -> dict[str, Any]:
        if self._done == self.dies_after:
            raise RuntimeError("killed")
        return super().state_dict()


class Remote:
    """An object whose methods are called as those of a Ray actor."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        async def call(*words: Any) -> Any:
            answer = getattr(self._target, name)(*words)
            return await answer if inspect.isawaitable(answer) else answer

        return SimpleNamespace(remote=call)


async def sample(args: Args, monkeypatch: pytest.MonkeyPatch, *, dies_after: int = -1) -> None:
    manager = EnginelessManager(args, [])
    manager.dies_after = dies_after
    monkeypatch.setattr(rollout_only, "create_placement", lambda *_: None)
    monkeypatch.setattr(rollout_only, "EngineGroup", lambda *_: SimpleNamespace(actors=[]))
    monkeypatch.setattr(rollout_only, "create_rollout_manager", lambda *_: Remote(manager))
    state = kept_rollout_state(args)
    first = 0 if state is None else state["rollout_id"] + 1
    with Tracker(args, resume_step=first + 1 if first else 0) as tracker:
        await rollout_only.sample_rollouts(args, tracker, state)


def made(folder: Path) -> tuple[dict[str, bytes], list[tuple[int, float]]]:
    """All files of rollouts, and what the metrics say of them."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    files = {path.name: path.read_bytes() for path in (folder / "rollouts").iterdir()}
    return files, [(line["step"], line["rollout/reward_mean"]) for line in lines]


async def test_interrupted_sampling_goes_on_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": str(i)}) + "\n" for i in range(8)))
    settings = {"prompt_data": str(prompts), "num_rollout": 5, "rollout_batch_size": 2, "n_samples_per_prompt": 2}
    settings |= {"over_sampling_batch_size": 4, "dynamic_sampling_max_replacements": 4, "rollout_only": True}
    settings |= {"tensorboard": False}
    whole, cut = (Args.build(run_dir=str(tmp_path / name), **settings) for name in ("whole", "cut"))
    await sample(whole, monkeypatch)
    with pytest.raises(RuntimeError, match="killed"):
        await sample(cut, monkeypatch, dies_after=2)
    assert (tmp_path / "cut" / "rollouts" / "rollout_000002.jsonl").exists(), "kept, but not counted"
    await sample(cut.replace(source="flag", resume=True), monkeypatch)
    assert made(tmp_path / "cut") == made(tmp_path / "whole")
    assert len(made(tmp_path / "whole")[0]) == 5 + 1
