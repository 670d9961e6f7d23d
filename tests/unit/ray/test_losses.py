"""Engines and training ranks that are lost while `train.py` runs: it goes on, or ends with one line.

Program, trainer, rollout manager, engine pool and weight sync are the real ones, in one process; engines and training
ranks are stand-ins that take a moment for each call and do nothing else, so that a test can let one die at any call.
"""

import asyncio
import gc
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from miles.backends.sglang.client import EngineUnreachable, RankChecksums, SamplingParams
from miles.config import Args
from miles.contracts.artifact import write_checkpoint_manifest
from miles.contracts.chain import iteration_folder
from miles.ray import online, weight_sync
from miles.ray.actor_group import TrainingRankLost
from miles.ray.program import run_program
from miles.ray.rollout.engine import EngineGroup
from miles.ray.rollout.manager import RolloutManager
from miles.rollout.engine_pool import EnginePool

TRAIN = Path(__file__).parents[3] / "train.py"
NUM_ENGINES = 2


class World:
    """Who is alive, what was asked of whom, and what befalls whom: `befalls[call]` happens when the call is made."""

    def __init__(self) -> None:
        self.alive: set[str] = set()
        self.num_servers = 0
        self.versions: dict[str, str] = {}
        self.groups: list[str] = []
        self.given_up: list[int] = []
        self.befalls: dict[str, Callable[[], Any]] = {}

    async def reach(self, call: str) -> None:
        await asyncio.sleep(0)
        if (befalls := self.befalls.pop(call, None)) is not None:
            befalls()

    def start_server(self) -> str:
        self.num_servers += 1
        url = f"http://127.0.0.1:{self.num_servers}"
        self.alive.add(url)
        return url

    def kill(self, *servers: int) -> None:
        """End servers, by the order in which they were started, from 1."""
        self.alive -= {f"http://127.0.0.1:{number}" for number in servers}


class Client:
    """A client of an engine, for samples and for weights."""

    world: World

    def __init__(self, url: str, **_: Any) -> None:
        self.url = url

    async def _call(self, call: str = "") -> None:
        await self.world.reach(call)
        if self.url not in self.world.alive:
            raise EngineUnreachable(f"{self.url}: nobody answers")

    async def generate(self, input_ids: list[int], sampling: SamplingParams) -> str:
        for _ in range(5):
            await self._call()
        return self.world.versions[self.url]

    async def update_weights_from_distributed(self, *, weight_version: str, **_: Any) -> None:
        await self._call(f"server {self.url[-1]} receives {weight_version}")
        self.world.versions[self.url] = weight_version

    async def weight_version(self) -> str:
        return self.world.versions[self.url]

    async def checksums(self, **_: Any) -> list[RankChecksums]:
        return [RankChecksums(0, 1, {})]

    async def check_health(self, **_: Any) -> None:
        await self._call()

    async def _quick(self, *_: Any, **__: Any) -> None:
        await self._call()

    init_weights_update_group = destroy_weights_update_group = pause = begin_weight_update = _quick
    end_weight_update = flush_cache = resume = _quick

    async def close(self) -> None: ...


class Keeper:
    """The process that keeps an engine's server."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def start(self) -> str:
        await self._world.reach("start")
        return self._world.start_server()

    restart = start

    def stop(self) -> None: ...


class Ranks:
    """A training group."""

    dp_size = 1

    def __init__(self, world: World, args: Args, role: str) -> None:
        self.role, self._world, self._args = role, world, args
        world.groups.append("from scratch" if args.load is None else Path(args.load).name)

    async def init(self) -> None:
        await self._world.reach("init")

    async def reserve_address(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    async def call(self, method: str, *_: Any, **__: Any) -> list[Any]:
        await self._world.reach(method)
        return [[SimpleNamespace(names=(), dtypes=(), shapes=())] if method == "weight_buckets" else {}]

    async def train_policy(self, step: int, shard: dict[str, Any]) -> dict[str, float]:
        await self._world.reach(f"update {step}")
        return {"policy_loss": 0.0, "tokens": 1.0}

    async def raise_if_lost(self) -> None:
        await self._world.reach("ping")

    async def save_model(self, iteration: int) -> str:
        assert self._args.save is not None
        folder = iteration_folder(self._args.save, iteration)
        folder.mkdir(parents=True)
        (folder / "identity.json").write_text("{}")
        write_checkpoint_manifest(folder, iteration=iteration)
        return str(folder)

    def shutdown(self) -> None: ...


class Manager(RolloutManager):
    """Asks every engine for one sample, whose token is the weight version of who answers."""

    world: World

    async def start(self) -> list[str]:
        urls = [await engine.start.remote() for engine in self._engines]
        self._pool = EnginePool([self._client(url) for url in urls], health_timeout_s=60.0)
        return urls

    def _client(self, url: str) -> Any:
        return Client(url)

    async def stop(self) -> None: ...

    def give_up_engine(self, number: int, reason: str) -> None:
        self.world.given_up.append(number)
        super().give_up_engine(number, reason)

    def state_dict(self) -> dict[str, Any]:
        return {"sha256": "", "leftover": []}

    def load_state(self, state: dict[str, Any]) -> None: ...

    async def generate(self, rollout_id: int, *, keep: bool = True) -> dict[str, Any]:
        asked = [engine.generate([1], SamplingParams(max_new_tokens=1)) for engine in self._pool.engines]
        asked = [asyncio.ensure_future(one) for one in asked]
        await self.world.reach(f"rollout {rollout_id}")
        versions = [int(version) for version in await asyncio.gather(*asked)]
        batch = {
            "tokens": [[1, version] for version in versions],
            "response_lengths": [1] * NUM_ENGINES,
            "loss_masks": [[1]] * NUM_ENGINES,
            "sample_indices": list(range(NUM_ENGINES)),
            "group_indices": list(range(NUM_ENGINES)),
            "rewards": [1.0, 0.0],
            "rollout_log_probs": [[-1.0]] * NUM_ENGINES,
        }
        return {"batch": batch, "metrics": {"rollout/reward_mean": sum(versions) / NUM_ENGINES}, "warnings": []}


class Program:
    """`train.py` of four rollouts, saved after the second and the last, on stand-ins."""

    def __init__(self, folder: Path, world: World, capsys: pytest.CaptureFixture[str]) -> None:
        self._folder, self._world, self._capsys = folder, world, capsys

    def run(self, **settings: Any) -> tuple[int, str]:
        """Exit code and what stands in stderr."""
        spec = importlib.util.spec_from_file_location("train_program", TRAIN)
        assert spec is not None and spec.loader is not None
        train = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(train)
        args = Args.build(
            run_dir=str(self._folder),
            save=str(self._folder / "actor"),
            advantage_estimator="reinforce_plus_plus",
            num_rollout=4,
            save_interval=2,
            global_batch_size=NUM_ENGINES,
            rollout_num_gpus=NUM_ENGINES,
            tensorboard=False,
            **settings,
        )
        try:
            run_program("train.py", train.main(args, None, {}))
        except SystemExit as ended:
            code = ended.code
        else:
            code = 0
        # A failed call that nobody has looked at is told, with a trace, when its future is collected.
        gc.collect()
        assert isinstance(code, int)
        return code, self._capsys.readouterr().err

    def rewards(self) -> dict[int, list[float]]:
        """What was logged of the rollouts, by step: the weight version that sampled."""
        rewards: dict[int, list[float]] = {}
        for line in map(json.loads, (self._folder / "metrics.jsonl").read_text().splitlines()):
            if "rollout/reward_mean" in line:
                rewards.setdefault(line["step"], []).append(line["rollout/reward_mean"])
        return rewards


UNDISTURBED = {1: [1.0], 2: [2.0], 3: [3.0], 4: [4.0]}
"""Rollout i is sampled by version i + 1 alone, and logged once."""


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def program(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    as_actor: Callable[[Any], Any],
) -> Program:
    monkeypatch.setattr(Client, "world", world, raising=False)
    monkeypatch.setattr(Manager, "world", world, raising=False)
    monkeypatch.setattr(weight_sync, "SGLangClient", Client)
    monkeypatch.setattr(EngineGroup, "_create", lambda self, number: as_actor(Keeper(world)))
    placement = SimpleNamespace(bundles={"rollout": [None] * NUM_ENGINES}, cluster=SimpleNamespace(device_kind="cpu"))
    monkeypatch.setattr(online, "create_placement", lambda *_: placement)
    monkeypatch.setattr(online, "create_rollout_manager", lambda args, engines: as_actor(Manager(args, engines)))
    monkeypatch.setattr(online, "RayTrainGroup", lambda args, *, role, **_: Ranks(world, args, role))
    monkeypatch.setattr(online, "split_train_data_by_dp", lambda args, columns, *, dp_size: columns)
    monkeypatch.setattr(online.ray, "cancel", lambda call: call.cancel())
    return Program(tmp_path, world, capsys)


def dies(what: str = "a rank of the actor group died") -> Callable[[], None]:
    def die() -> None:
        raise TrainingRankLost(what)

    return die


def fails(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def test_engine_lost_in_a_rollout_is_replaced_and_samples_with_the_same_weights(
    program: Program, world: World
) -> None:
    world.befalls = {"rollout 2": lambda: world.kill(1)}
    code, err = program.run()
    assert (code, world.num_servers) == (0, NUM_ENGINES + 1), err
    assert program.rewards() == UNDISTURBED


def test_engine_that_may_not_start_again_ends_the_run_with_one_clear_line(program: Program, world: World) -> None:
    world.befalls = {"rollout 2": lambda: world.kill(1)}
    code, err = program.run(sglang_max_restarts=0)
    assert code == 1
    last = "train.py: engine 0 is lost (http://127.0.0.1:1: nobody answers) after 0 restarts of engines, and "
    assert err.splitlines()[-1] == f"{last}--sglang-max-restarts is 0"
    assert "Traceback" not in err
    assert world.num_servers == NUM_ENGINES
    # Its requests end rather than wait for ever.
    assert world.given_up == [0]


def test_engine_whose_new_server_does_not_start_ends_the_run_with_its_reason(program: Program, world: World) -> None:
    def kill() -> None:
        world.kill(2)
        world.befalls["start"] = fails(ValueError("rollout engine on port 7 did not start: no room (log: x)"))

    world.befalls = {"rollout 1": kill}
    code, err = program.run()
    assert code == 1
    assert err.splitlines()[-1] == "train.py: rollout engine on port 7 did not start: no room (log: x)"
    assert "Traceback" not in err


@pytest.mark.parametrize("first", ["engine", "actor"], ids=["engine_says_it", "actor_breaks_first"])
def test_new_server_lost_while_it_gets_its_weights_is_replaced_again(
    first: str, program: Program, world: World
) -> None:
    def kill() -> None:
        world.kill(1)
        if first == "engine":
            world.befalls["server 3 receives 2"] = lambda: world.kill(3)
        else:
            world.befalls["broadcast_bucket"] = break_off

    def break_off() -> None:
        world.kill(3)
        raise RayTaskError("call", "a trace", RuntimeError("connection closed by peer"))

    world.befalls = {"rollout 1": kill}
    code, err = program.run()
    assert (code, world.num_servers) == (0, NUM_ENGINES + 2), err
    assert program.rewards() == UNDISTURBED


@pytest.mark.parametrize("where", ["rollout 1", "update 2"], ids=["to_a_new_server", "to_all"])
def test_transfer_that_breaks_while_every_engine_lives_ends_the_run_with_its_reason(
    where: str, program: Program, world: World
) -> None:
    def strike() -> None:
        if where == "rollout 1":
            world.kill(1)
        world.befalls["broadcast_bucket"] = fails(RayTaskError("call", "a trace", RuntimeError("out of memory")))

    world.befalls = {where: strike}
    code, err = program.run()
    assert (code, err.splitlines()[-1]) == (1, "train.py: out of memory")
    assert "Traceback" not in err


def test_training_rank_lost_behind_a_transfer_that_breaks_is_started_again(program: Program, world: World) -> None:
    """The engines notice before the driver does."""

    def strike() -> None:
        world.befalls["broadcast_bucket"] = fails(RayTaskError("call", "a trace", RuntimeError("connection closed")))
        world.befalls["ping"] = dies()

    world.befalls = {"update 4": strike}
    code, err = program.run()
    assert code == 0, err
    assert world.groups == ["from scratch", "iter_0000002"]
    assert program.rewards() == UNDISTURBED


def test_engines_lost_while_weights_are_published_are_replaced_and_get_them(program: Program, world: World) -> None:
    world.befalls = {"server 2 receives 3": lambda: world.kill(1, 2)}
    code, err = program.run()
    assert (code, world.num_servers) == (0, 2 * NUM_ENGINES), err
    assert program.rewards() == UNDISTURBED


def test_loss_that_is_reported_after_a_new_start_replaced_the_engine_is_passed_over(
    program: Program, world: World
) -> None:
    """Both engines are lost, and a rank while the first one's new server gets its weights: the second one's loss is
    still to be taken when the new start has found and replaced it."""

    def strike() -> None:
        world.kill(1, 2)
        world.befalls["broadcast_bucket"] = dies()

    world.befalls = {"rollout 1": strike}
    code, err = program.run()
    assert (code, world.num_servers) == (0, NUM_ENGINES + 1 + NUM_ENGINES), err
    assert world.groups == ["from scratch"] * 2
    assert program.rewards() == UNDISTURBED


@pytest.mark.parametrize(
    ("moment", "goes_on"),
    [("rollout 1", "from scratch"), ("update 2", "from scratch"), ("update 3", "iter_0000002")],
)
def test_training_rank_lost_starts_again_from_the_last_save_and_repeats_no_line(
    moment: str, goes_on: str, program: Program, world: World
) -> None:
    world.befalls = {moment: dies()}
    code, err = program.run()
    assert (code, world.num_servers) == (0, NUM_ENGINES), err
    assert world.groups == ["from scratch", goes_on]
    assert program.rewards() == UNDISTURBED


def test_training_rank_lost_again_while_the_run_starts_again_counts_and_is_told_by_the_limit(
    program: Program, world: World
) -> None:
    def strike() -> None:
        world.befalls["init"] = dies("the second loss")
        raise TrainingRankLost("the first loss")

    world.befalls = {"update 4": strike}
    code, err = program.run(max_restarts=1)
    assert code == 1
    told = "train.py: the second loss; --max-restarts 1 allows no other start, --resume goes on from the last save"
    assert err.splitlines()[-1] == told
    assert "Traceback" not in err
    assert world.groups == ["from scratch", "iter_0000002"]


def test_engine_and_training_rank_lost_at_once_are_both_replaced(program: Program, world: World) -> None:
    def strike() -> None:
        world.kill(2)
        raise TrainingRankLost("a rank of the actor group died")

    world.befalls = {"update 3": strike}
    code, err = program.run()
    assert (code, world.num_servers) == (0, NUM_ENGINES + 1), err
    assert world.groups == ["from scratch", "iter_0000002"]
    assert program.rewards() == UNDISTURBED


def test_engine_that_may_not_start_again_beside_a_lost_rank_ends_the_run_with_one_clear_line(
    program: Program, world: World
) -> None:
    def strike() -> None:
        world.kill(2)
        raise TrainingRankLost("a rank of the actor group died")

    world.befalls = {"update 3": strike}
    code, err = program.run(sglang_max_restarts=0)
    assert code == 1
    assert err.splitlines()[-1].startswith("train.py: engine 1 is lost (http://127.0.0.1:2: nobody answers)")
    assert "Traceback" not in err
