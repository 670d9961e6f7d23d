"""Sampling alone, interrupted and gone on with: the same rollouts, to the byte, as without the interruption."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miles.config import Args
from miles.data.prompts import PromptSource
from miles.data.sample import Sample, SampleStatus
from miles.ray import rollout_only
from miles.ray.rollout.manager import RolloutManager
from miles.rollout.filters import load_filter
from miles.rollout.groups import GroupSource
from miles.rollout.inputs import run_inputs
from miles.rollout.preflight import kept_rollout_state
from miles.utils.tracking_utils.tracking import Tracker


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
        self._source = GroupSource(prompts, samples_per_prompt=2)
        self._keep = load_filter("miles.rollout.filters:nonzero_reward_std", timeout_s=60.0)
        self._pool: Any = SimpleNamespace(busy_seconds=lambda: [0.0], engines=[])
        self._done = -1
        return []

    async def stop(self) -> None:
        pass

    async def next_lost_engine(self) -> Any:
        await asyncio.Event().wait()

    async def generate(self, rollout_id: int, *, keep: bool = True) -> dict[str, Any]:
        self._done = rollout_id
        return await super().generate(rollout_id, keep=keep)

    async def _run(self, samples: list[Sample], *, rollout_id: int, sampling: Any = None) -> None:
        for sample in samples:
            sample.append_response_tokens([7 + rollout_id, sample.index], log_probs=[-1.0, -0.5])
            sample.status = SampleStatus.COMPLETED
            sample.reward = float(sample.index % 2 if int(sample.prompt) % 3 else 1)

    def state_dict(self) -> dict[str, Any]:
        if self._done == self.dies_after:
            raise RuntimeError("killed")
        return super().state_dict()


async def sample(
    args: Args, monkeypatch: pytest.MonkeyPatch, as_actor: Callable[[Any], Any], *, dies_after: int = -1
) -> None:
    manager = EnginelessManager(args, [])
    manager.dies_after = dies_after
    monkeypatch.setattr(rollout_only, "create_placement", lambda *_: None)
    monkeypatch.setattr(rollout_only, "EngineGroup", lambda *_: SimpleNamespace(actors=[]))
    monkeypatch.setattr(rollout_only, "create_rollout_manager", lambda *_: as_actor(manager))
    state = kept_rollout_state(args)
    first = 0 if state is None else state["rollout_id"] + 1
    with Tracker(args, resume_step=first + 1 if first else 0) as tracker:
        await rollout_only.sample_rollouts(args, tracker, state, run_inputs(args))


def made(folder: Path) -> tuple[dict[str, bytes], list[tuple[int, float]]]:
    """All files of rollouts, and what the metrics say of them."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    files = {path.name: path.read_bytes() for path in (folder / "rollouts").iterdir()}
    # Its settings name the run folder, and the seal is of them too.
    state = json.loads(files["state.json"])
    files["state.json"] = json.dumps({**state, "settings": None, "seal_sha256": None}).encode()
    return files, [(line["step"], line["rollout/reward_mean"]) for line in lines]


async def test_interrupted_sampling_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_actor: Callable[[Any], Any]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": str(i)}) + "\n" for i in range(8)))
    settings = {"prompt_data": str(prompts), "num_rollout": 5, "rollout_batch_size": 2, "n_samples_per_prompt": 2}
    settings |= {"over_sampling_batch_size": 4, "dynamic_sampling_max_replacements": 4, "rollout_only": True}
    settings |= {"tensorboard": False}
    whole, cut = (Args.build(run_dir=str(tmp_path / name), **settings) for name in ("whole", "cut"))
    await sample(whole, monkeypatch, as_actor)
    with pytest.raises(RuntimeError, match="killed"):
        await sample(cut, monkeypatch, as_actor, dies_after=2)
    assert (tmp_path / "cut" / "rollouts" / "rollout_000002.jsonl").exists(), "kept, but not counted"
    await sample(cut.replace(source="flag", resume=True), monkeypatch, as_actor)
    assert made(tmp_path / "cut") == made(tmp_path / "whole")
    assert len(made(tmp_path / "whole")[0]) == 5 + 1
