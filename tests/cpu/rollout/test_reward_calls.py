"""Reward functions in processes and threads of their own: whatever one does, its time limit is kept."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from miles.data.sample import Sample, SampleStatus
from miles.rollout.reward_calls import RewardFunction
from miles.rollout.rewards import score_samples

FUNCTIONS = """
import asyncio, os, re, subprocess, sys, time

calls = 0

class Callable:
    async def __call__(self, sample):
        return sample.index

callable_reward = Callable()

def plain(sample):
    return sample.index

async def asynchronous(sample):
    await asyncio.sleep(0)
    return sample.index

def together(samples):
    return [sample.index for sample in samples]

async def async_together(samples):
    return [sample.index for sample in samples]

def later_ones_first(sample):
    time.sleep(0.02 * (15 - sample.index))
    sample.metadata |= {"seen": [sample.label, sample.index], "pid": os.getpid()}
    sample.tokens.append(5)
    return sample.index

def sorts(samples):
    samples.sort(key=lambda sample: -sample.index)
    return [sample.index for sample in samples]

async def sorts_async(samples):
    return sorts(samples)

async def cancels(sample):
    raise asyncio.CancelledError("scope")

async def cancels_itself(sample):
    asyncio.current_task().cancel()
    await asyncio.sleep(0)

async def async_writes(sample):
    sample.loss_mask[:] = [0] * len(sample.loss_mask)
    sample.rollout_log_probs[:] = [9.0] * len(sample.rollout_log_probs)
    sample.tokens.append(5)
    sample.reward, sample.metadata["nested"] = 3.0, {"list": [1]}
    return sample.index

async def async_notes(sample):
    sample.metadata["seen"] = sample.index
    return sample.index

def backtracks(sample):
    if sample.index == 11:
        re.match(r"(a+)+$", "a" * 40 + "!")
    return 1.0

def backtracks_together(samples):
    return backtracks(samples[1])

async def blocks(sample):
    if sample.index == 11:
        time.sleep(20)
    return 1.0

async def slow(sample):
    await asyncio.sleep(60 if sample.index == 11 else 0)
    return 1.0

def dies(sample):
    if sample.index == 11:
        os._exit(3)
    return 1.0

def exits(sample):
    sys.exit("enough")

async def exits_async(sample):
    sys.exit("enough")

def stop_iteration(sample):
    return next(iter(()))

def fails(sample):
    raise KeyError("gold")

def out_of_time(sample):
    raise TimeoutError("judge")

async def out_of_time_async(sample):
    raise TimeoutError("judge")

def forks(sample):
    pid = os.fork()
    return -1.0 if pid == 0 else sample.index

def returns_what_cannot_be_sent(sample):
    return lambda: 1.0

def counts(sample):
    global calls
    calls += 1
    return calls

def starts_a_process_and_hangs(sample):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    open(sample.label, "w").write(f"{os.getpid()} {child.pid}")
    re.match(r"(a+)+$", "a" * 40 + "!")
"""


def make_samples(count: int) -> list[Sample]:
    return [
        Sample(index=10 + n, group_index=n, rollout_id=0, prompt="p", tokens=[1], status=SampleStatus.COMPLETED)
        for n in range(count)
    ]


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("functions") / "rewards.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
async def load(functions: Path) -> AsyncIterator[Callable[..., RewardFunction]]:
    """load(name, workers=2) -> the function; none of its processes is left after the test."""
    before = set(psutil.Process().children())
    loaded = []

    def make(name: str, workers: int = 2) -> RewardFunction:
        loaded.append(RewardFunction(f"{functions}:{name}", concurrency=workers))
        return loaded[-1]

    yield make
    for one in loaded:
        one.close()
    assert set(psutil.Process().children()) - before == set()


@pytest.mark.parametrize("name", ["plain", "asynchronous", "together", "async_together", "callable_reward"])
async def test_every_kind_of_function_scores_every_sample(name: str, load: Callable[..., RewardFunction]) -> None:
    samples = make_samples(5)
    assert await score_samples(samples, load(name), timeout_s=30) == []
    assert [sample.reward for sample in samples] == [10.0, 11.0, 12.0, 13.0, 14.0]


async def test_rewards_and_metadata_come_back_to_their_samples_and_nothing_else(
    load: Callable[..., RewardFunction],
) -> None:
    samples = make_samples(5)
    for sample in samples:
        sample.label, sample.metadata = {"gold": sample.index}, {"kept": [1]}
    assert await score_samples(samples, load("later_ones_first"), timeout_s=30) == []
    assert [sample.reward for sample in samples] == [10.0, 11.0, 12.0, 13.0, 14.0]
    assert [sample.metadata["seen"] for sample in samples] == [[{"gold": n}, n] for n in range(10, 15)]
    assert all(sample.metadata["kept"] == [1] and sample.tokens == [1] for sample in samples)
    assert os.getpid() not in {sample.metadata["pid"] for sample in samples}


async def test_child_that_the_function_forks_and_lets_return_answers_for_nobody(
    load: Callable[..., RewardFunction],
) -> None:
    # Its answer would lie there first when the next sample is asked for.
    samples = make_samples(6)
    await score_samples(samples, load("forks", workers=1), timeout_s=30, concurrency=1)
    assert [sample.reward for sample in samples] == [10.0, 11.0, 12.0, 13.0, 14.0, 15.0]


async def test_metadata_of_an_async_function_comes_back(load: Callable[..., RewardFunction]) -> None:
    samples = make_samples(2)
    await score_samples(samples, load("async_notes"), timeout_s=30)
    assert [sample.metadata for sample in samples] == [{"seen": 10}, {"seen": 11}]


async def test_async_function_that_writes_to_its_sample_changes_metadata_and_reward_alone(
    load: Callable[..., RewardFunction],
) -> None:
    samples, untouched = make_samples(2), make_samples(2)
    for sample in samples + untouched:
        sample.append_response_tokens([4, 6], log_probs=[-1.0, -2.0])
    await score_samples(samples, load("async_writes"), timeout_s=30)
    for sample in untouched:
        sample.reward, sample.metadata = float(sample.index), {"nested": {"list": [1]}}
    assert samples == untouched


@pytest.mark.parametrize("name", ["backtracks", "slow"])
async def test_function_that_never_returns_is_cut_off_and_named(
    name: str, load: Callable[..., RewardFunction]
) -> None:
    samples, reward = make_samples(4), load(name)
    assert await score_samples(samples[:1], reward, timeout_s=30) == []
    began = time.monotonic()
    assert await score_samples(samples, reward, timeout_s=2) == [samples[1]]
    assert time.monotonic() - began < 15
    assert [sample.reward for sample in samples] == [1.0, None, 1.0, 1.0]
    assert samples[1].status is SampleStatus.FAILED
    assert f":{name} took more than 2 s on sample 11" in samples[1].metadata["failure"]


async def test_coroutine_that_blocks_is_cut_off_and_the_next_round_has_a_fresh_loop(
    load: Callable[..., RewardFunction],
) -> None:
    samples, reward = make_samples(2), load("blocks")
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.02)
            ticks += 1

    ticking = asyncio.create_task(tick())
    began = time.monotonic()
    late = await score_samples(samples, reward, timeout_s=0.5)
    assert time.monotonic() - began < 10
    assert ticks > 10, "this loop was held up"
    ticking.cancel()
    assert samples[1] in late and "on sample 11" in samples[1].metadata["failure"]
    assert await score_samples(make_samples(1), reward, timeout_s=5) == []


async def test_function_of_all_samples_that_never_returns_is_cut_off(load: Callable[..., RewardFunction]) -> None:
    samples, reward = make_samples(4), load("backtracks_together")
    with pytest.raises(ValueError, match=r":backtracks_together took more than 1 s on samples 10 to 13"):
        await score_samples(samples, reward, timeout_s=0.5, concurrency=2, on_timeout="stop")
    assert await score_samples(samples, reward, timeout_s=0.1) == samples


@pytest.mark.parametrize("policy", ["drop", "stop"])
async def test_process_that_dies_is_an_error_that_names_the_sample(
    policy: str, load: Callable[..., RewardFunction]
) -> None:
    samples, reward = make_samples(4), load("dies")
    line = r":dies failed on sample 11: its process ended with exit status 3"
    if policy == "stop":
        with pytest.raises(ValueError, match=line):
            await score_samples(samples, reward, timeout_s=30)
        return
    assert await score_samples(samples, reward, timeout_s=30, on_error="drop") == [samples[1]]
    assert [sample.reward for sample in samples] == [1.0, None, 1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("exits", r"exits failed on sample 10: SystemExit: enough"),
        ("exits_async", r"exits_async failed on sample 10: SystemExit: enough"),
        ("cancels", r"cancels failed on sample 10: it was cancelled"),
        ("cancels_itself", r"cancels_itself failed on sample 10: it was cancelled"),
        ("stop_iteration", r"stop_iteration failed on sample 10: StopIteration"),
        ("fails", r"fails failed on sample 10: KeyError: 'gold'"),
        ("out_of_time", r"out_of_time ran out of time \(TimeoutError: judge\) on sample 10"),
        ("out_of_time_async", r"out_of_time_async ran out of time \(TimeoutError: judge\) on sample 10"),
        ("returns_what_cannot_be_sent", r"returned <function .* for sample 10, expected a number"),
    ],
)
async def test_mistake_inside_the_function_is_one_line(
    name: str, line: str, load: Callable[..., RewardFunction]
) -> None:
    with pytest.raises(ValueError, match=line) as caught:
        await score_samples(make_samples(1), load(name), timeout_s=30, on_timeout="stop")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["sorts", "sorts_async"])
async def test_function_that_sorts_the_list_it_was_given_is_refused(
    name: str, load: Callable[..., RewardFunction]
) -> None:
    samples = make_samples(3)
    with pytest.raises(ValueError, match=rf":{name} changed the list of samples it was given"):
        await score_samples(samples, load(name), timeout_s=30)
    assert [sample.reward for sample in samples] == [None] * 3


async def test_workers_are_kept_and_one_that_died_idle_is_replaced(load: Callable[..., RewardFunction]) -> None:
    before = set(psutil.Process().children())
    reward = load("counts", workers=1)
    assert set(psutil.Process().children()) == before
    for expected in (1.0, 2.0, 3.0):
        (sample,) = make_samples(1)
        await score_samples([sample], reward, timeout_s=30)
        assert sample.reward == expected
    (worker,) = set(psutil.Process().children()) - before
    worker.kill()
    psutil.wait_procs([worker], timeout=10)
    (sample,) = make_samples(1)
    assert await score_samples([sample], reward, timeout_s=30) == []
    assert sample.reward == 1.0


async def test_worker_that_finds_another_file_than_the_first_did_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text("def score(sample): return 1.0\n")
    reward = RewardFunction(f"{file}:score", concurrency=2, flag="--custom-rm-path")
    samples = make_samples(2)
    try:
        assert await score_samples(samples[:1], reward, timeout_s=30) == []
        file.write_text("def score(sample): return 777.0\n")
        assert await score_samples(samples[:1], reward, timeout_s=30) == []
        assert samples[0].reward == 1.0
        with pytest.raises(ValueError, match=rf"^--custom-rm-path {file}:score: {file} changed while the run went on"):
            await score_samples(samples, reward, timeout_s=30)
    finally:
        reward.close()


async def test_call_that_is_given_up_ends_its_process(tmp_path: Path, load: Callable[..., RewardFunction]) -> None:
    (sample,) = make_samples(1)
    sample.label = str(tmp_path / "pids")
    scoring = asyncio.create_task(score_samples([sample], load("starts_a_process_and_hangs"), timeout_s=60))
    pids = await _pids(tmp_path / "pids")
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    await _gone(pids)


async def test_worker_dies_with_a_killed_manager(tmp_path: Path, functions: Path) -> None:
    program = f"""
import asyncio
from miles.data.sample import Sample
from miles.rollout.reward_calls import RewardFunction
from miles.rollout.rewards import score_samples
sample = Sample(index=0, group_index=0, rollout_id=0, prompt="p", tokens=[1], label={str(tmp_path / "pids")!r})
reward = RewardFunction({f"{functions}:starts_a_process_and_hangs"!r}, concurrency=1)
asyncio.run(score_samples([sample], reward, timeout_s=120))
"""
    with subprocess.Popen([sys.executable, "-c", program]) as manager:
        try:
            worker, child = await _pids(tmp_path / "pids")
        finally:
            manager.kill()
    await _gone([worker])
    os.kill(child, signal.SIGKILL)


async def _pids(path: Path) -> list[int]:
    for _ in range(600):
        if path.exists() and len(pids := path.read_text().split()) == 2:
            return [int(pid) for pid in pids]
        await asyncio.sleep(0.05)
    raise AssertionError("the function was not called")


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def _gone(pids: list[int]) -> None:
    for _ in range(200):
        if not any(map(_runs, pids)):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"still there: {pids}")
