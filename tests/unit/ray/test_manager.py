"""What the rollout side says before it starts engines, and the figures of a rollout."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miles.config import Args
from miles.config.eval_sets import EvalSet, Sampling
from miles.data.prompts import PromptSource
from miles.data.sample import Sample, SampleStatus, read_samples
from miles.ray.rollout.manager import RolloutManager, _eval_metrics, _prompt_limit, _rollout_metrics
from miles.reporting.wilson import wilson_interval
from miles.rollout.filters import load_filter
from miles.rollout.groups import GroupSource


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({}, 128 - 8),
        ({"sglang_max_total_tokens": 64, "device": "cuda"}, 64 - 8),
        ({"max_tokens_per_gpu": 32}, 32 - 8),
        ({"max_tokens_per_gpu": 32, "context_parallel_size": 2}, 64 - 8),
        ({"rollout_max_prompt_len": 9}, 9),
    ],
)
def test_prompt_limit_is_what_the_tightest_place_leaves(settings: dict[str, Any], limit: int) -> None:
    assert _prompt_limit(Args.build(**settings), {"max_position_embeddings": 128}, 8, trained=True) == limit


def test_prompt_limit_of_what_is_not_trained_on_is_not_a_micro_batchs() -> None:
    args = Args.build(max_tokens_per_gpu=32)
    assert _prompt_limit(args, {"max_position_embeddings": 128}, 64, trained=False) == 128 - 64


@pytest.mark.parametrize(("device", "limit"), [("cpu", 32768 - 8), ("cuda", None)])
def test_prompt_limit_of_an_unset_cache_is_that_of_a_cpu(device: str, limit: int | None) -> None:
    assert _prompt_limit(Args.build(device=device), {}, 8, trained=True) == limit


def sample(index: int, reward: float | None, **changes: Any) -> Sample:
    made = Sample(
        index=index,
        group_index=index // 2,
        rollout_id=0,
        prompt="p",
        tokens=[1, 2, 3],
        response_length=1 + index % 2,
        loss_mask=[1] * (1 + index % 2),
        rollout_log_probs=[-1.0] * (1 + index % 2),
        reward=reward,
        status=SampleStatus.COMPLETED if reward is not None else SampleStatus.FAILED,
        weight_versions=["3"],
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_figures_of_a_rollout_leave_unscored_samples_out_of_rewards() -> None:
    samples = [sample(0, 1.0), sample(1, 0.0), sample(2, 1.0), sample(3, None, weight_versions=["2", "3"])]
    figures = _rollout_metrics(samples)
    assert figures["rollout/reward_mean"] == pytest.approx(2 / 3)
    assert (figures["rollout/count"], figures["rollout/unscored"]) == (4, 1)
    assert (figures["rollout/reward_min"], figures["rollout/reward_max"]) == (0.0, 1.0)
    assert figures["rollout/response_length_max"] == 2
    assert figures["rollout/equal_reward_groups"] == pytest.approx(0.5)
    assert figures["rollout/stale_fraction"] == pytest.approx(0.25)


def test_rollout_without_any_reward_is_one_line() -> None:
    late = sample(0, None, metadata={"failure": "reward function judge took more than 1 s on sample 0"})
    with pytest.raises(RuntimeError, match=r"no sample of 2 has a reward; the first: reward function judge took more"):
        _rollout_metrics([late, sample(1, None)])


EVAL_SET = EvalSet("two", "t.jsonl", Sampling(0.0, 1.0, -1, 1, 8, None))


def test_unscored_answers_are_in_no_figure_of_an_evaluation() -> None:
    answers = [sample(0, 1.0), sample(2, None), sample(4, 0.5), sample(6, None), sample(8, 0.0)]
    figures = _eval_metrics(EVAL_SET, answers)
    assert (figures["eval/two/count"], figures["eval/two/unscored"]) == (3, 2)
    assert figures["eval/two/accuracy"] == pytest.approx(1 / 3)
    assert (figures["eval/two/accuracy_low"], figures["eval/two/accuracy_high"]) == wilson_interval(1, 3)
    assert figures["eval/two/reward_mean"] == pytest.approx(0.5)


def test_evaluation_without_any_reward_is_one_line_with_the_reason() -> None:
    aborted = sample(0, None, status=SampleStatus.ABORTED)
    with pytest.raises(RuntimeError, match=r"evaluation set two: no answer of 1 .*the first: sample 0 is aborted"):
        _eval_metrics(EVAL_SET, [aborted])


class Characters:
    """A tokenizer of character codes."""

    chat_template = None
    name_or_path = "characters"

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(c) for c in text] for text in texts]}


@pytest.fixture
def make_manager(tmp_path: Path) -> Any:
    """make_manager(late, keep=None, **settings) -> a manager whose rewards are 0 and 1, or late for samples `late`."""

    def make(late: set[int], keep: Any = None, **settings: Any) -> RolloutManager:
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": "x" * (1 + i)}) + "\n" for i in range(20)))
        counts = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "num_rollout": 1, "overlong_prompts": "drop"}
        manager = RolloutManager(Args.build(**counts, **settings), [])
        manager._tokenizer, manager._keep = Characters(), keep
        manager._pool = SimpleNamespace(busy_seconds=lambda: [0.0], engines=[])
        manager._source = GroupSource(PromptSource(prompts, tokenizer=Characters()), samples_per_prompt=2)
        manager._eval_sets = [(EVAL_SET, manager._prompts(str(prompts), 5))]

        async def run(samples: list[Sample], **_: Any) -> None:
            for one in samples:
                one.append_response_tokens([7], log_probs=[-1.0])
                one.status, one.reward = SampleStatus.COMPLETED, float(one.index % 2)
                if one.index in late:
                    one.status, one.reward = SampleStatus.FAILED, None
                    one.metadata["failure"] = f"judge late on sample {one.index}"

        manager._run = run
        return manager

    return make


async def test_late_rewards_of_filtered_groups_are_counted_and_named(make_manager: Any) -> None:
    settings = {"over_sampling_batch_size": 2, "dynamic_sampling_max_replacements": 8}
    rollout = await make_manager(
        {1, 2}, load_filter("miles.rollout.filters:nonzero_reward_std", timeout_s=60.0), **settings
    ).generate(0)
    assert rollout["batch"]["sample_indices"] == [4, 5, 6, 7]
    assert (rollout["metrics"]["rollout/unscored"], rollout["metrics"]["rollout/unscored_replaced"]) == (0, 2)
    assert rollout["warnings"][1:] == [f"judge late on sample {n}; not trained on" for n in (1, 2)]


async def test_reward_of_all_that_was_sampled_is_told_beside_that_of_the_groups_kept(make_manager: Any) -> None:
    settings = {"over_sampling_batch_size": 2, "dynamic_sampling_max_replacements": 8}
    keep = load_filter("miles.rollout.filters:nonzero_reward_std", timeout_s=60.0)
    metrics = (await make_manager({0, 2}, keep, **settings).generate(0))["metrics"]
    # Of samples 0 to 7 the first and the third have no reward, and their groups are taken out.
    assert metrics["rollout/reward_mean"] == 0.5
    assert metrics["rollout/sampled_reward_mean"] == pytest.approx((1 + 1 + 0 + 1 + 0 + 1) / 6)


async def test_late_rewards_are_trained_around_without_a_filter(make_manager: Any) -> None:
    settings = {"over_sampling_batch_size": 6, "dynamic_sampling_max_replacements": 8}
    manager = make_manager({1}, **settings)
    rollout = await manager.generate(0)
    assert rollout["metrics"]["rollout/unscored"] == 1
    assert rollout["warnings"][1:] == ["judge late on sample 1; not trained on"]
    # and nothing was sampled for later, which only a filter gives a use
    assert (rollout["batch"]["sample_indices"], manager._source.num_leftover) == ([0, 1, 2, 3], 0)


async def test_evaluation_names_late_rewards_and_prompts_left_out_once(make_manager: Any) -> None:
    manager = make_manager({1})
    evaluated = await manager.evaluate()
    assert (evaluated["metrics"]["eval/two/count"], evaluated["metrics"]["eval/two/unscored"]) == (4, 1)
    dropped, late = evaluated["warnings"]
    assert "15 of 20 prompts are longer than 5 tokens and left out" in dropped
    assert late == "judge late on sample 1; not counted"
    assert len((await manager.evaluate())["warnings"]) == 1


def write(folder: Path, rollout: int, samples: list[Sample]) -> None:
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(one.to_dict()) + "\n" for one in samples)
    (folder / f"rollout_{rollout:06d}.jsonl").write_text(text)


async def test_kept_rollouts_are_read_back(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    write(folder, 0, [sample(0, 1.0), sample(1, 0.0)])
    settings = {"rollout_batch_size": 1, "n_samples_per_prompt": 2, "load_rollouts": str(folder)}
    manager = RolloutManager(Args.build(num_rollout=1, **settings), [])
    assert await manager.start() == []
    batch = (await manager.generate(0))["batch"]
    assert (batch["sample_indices"], batch["rewards"], batch["group_indices"]) == ([0, 1], [1.0, 0.0], [0, 0])
    write(folder, 0, [sample(0, 1.0)])
    with pytest.raises(ValueError, match=r"rollout_000000.jsonl: 1 samples, --rollout-batch-size 1 x"):
        await manager.generate(0)


def test_damaged_line_of_a_kept_rollout_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rollout_000000.jsonl"
    path.write_text(json.dumps(sample(0, 1.0).to_dict()) + "\n{}\n")
    with pytest.raises(ValueError, match=r"rollout_000000.jsonl:2: sample misses fields"):
        read_samples(path)
    path.write_text("")
    with pytest.raises(ValueError, match="no samples"):
        read_samples(path)
