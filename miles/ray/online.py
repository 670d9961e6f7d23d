"""One online step: rollout, values, critic and actor updates, weights published. And what a resume needs."""

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np

from miles.algorithms.advantages import compute_advantages_and_returns
from miles.algorithms.value_losses import explained_variance_from_stats
from miles.config import Args
from miles.contracts.chain import describe_checkpoint, iteration_folder
from miles.contracts.publish import publish_json
from miles.data.batch import select_rows, validate_batch
from miles.ray.actor_group import RayTrainGroup
from miles.ray.placement_group import Placement, create_placement
from miles.ray.rollout.engine import create_engines
from miles.ray.rollout.manager import create_rollout_manager
from miles.ray.rollout.train_data_conversion import Box, split_train_data_by_dp
from miles.ray.weight_sync import WeightSync
from miles.utils.tracking_utils.run_folder import read_run_json, update_run_json
from miles.utils.tracking_utils.tracking import Tracker

logger = logging.getLogger(__name__)

Batch = dict[str, Any]
Figures = dict[str, float]

STATE_FILE = "train_state.json"
"""Written last of a save: what it names is complete, and a resume starts from it."""
STATE_SCHEMA = "miles.train-state.v1"

_CRITIC_METRICS = {"value_loss": "value/loss", "grad_norm": "value/grad_norm", "lr": "value/lr"}
_ACTOR_METRICS = {
    "policy_loss": "train/policy_loss",
    "entropy": "train/entropy",
    "approx_kl": "train/approx_kl",
    "clip_fraction": "train/clip_fraction",
    "ratio_max": "train/ratio_max",
    "ratio_min": "train/ratio_min",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
}


def read_train_state(run_dir: str | Path) -> dict[str, Any] | None:
    """The newest complete save of a run folder, or None.

    Raises:
        ValueError: the file is not what a save wrote.
    """
    path = Path(run_dir) / STATE_FILE
    if not path.exists():
        return None
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: invalid JSON: {error}") from None
    if not isinstance(state, dict) or state.get("schema") != STATE_SCHEMA:
        raise ValueError(f"{path}: schema must be {STATE_SCHEMA!r}")
    return state


def resume_state(args: Args) -> dict[str, Any] | None:
    """The save to continue from with `--resume`, None for a fresh run.

    Raises:
        ValueError: there is nothing to continue, or a fresh run would write into the folder of another.
    """
    assert args.run_dir is not None
    state = read_train_state(args.run_dir)
    if args.resume and state is None:
        raise ValueError(f"--resume: {args.run_dir} holds no complete save (no {STATE_FILE})")
    if not args.resume and state is not None:
        raise ValueError(
            f"--run-dir {args.run_dir} holds a run saved after rollout {state['rollout_id']}; "
            "pass --resume to continue it, or name another folder"
        )
    return state


class OnlineTrainer:
    """Actor group, critic group and rollout engines of one run.

    After `step(i)` the engines serve the weights of version i + 2, and everything a resume needs is a function of
    (settings, checkpoints, prompt source state, i).
    """

    def __init__(self, args: Args, tracker: Tracker, state: dict[str, Any] | None) -> None:
        """`state`: the save to continue from, which `args` load too (`newest_checkpoints`); None for a fresh run."""
        self._args, self._tracker, self._state = args, tracker, state
        self._critic_args = args.for_role("critic")
        self._prompt_state: dict[str, Any] = {}

    async def __aenter__(self) -> Self:
        """Reserve devices, start engines and groups side by side, publish the first weights."""
        args, state = self._args, self._state
        self._placement: Placement = create_placement(
            args,
            {
                "actor": args.world_size("actor"),
                "critic": args.world_size("critic"),
                "rollout": args.rollout_num_gpus,
            },
        )
        self._actor = RayTrainGroup(args, role="actor", placement=self._placement)
        # A seed critic gives its weights only; the critic of a run that goes on keeps its optimizer.
        self._critic = RayTrainGroup(args, role="critic", placement=self._placement, load_weights_only=state is None)
        self._manager = create_rollout_manager(args, create_engines(args, self._placement))
        urls, _, _ = await asyncio.gather(self._manager.start.remote(), self._actor.init(), self._critic.init())
        if state is not None:
            self._prompt_state = state["prompts"]
            await self._manager.load_state.remote(state["prompts"])
        self._sync = WeightSync(args, actor=self._actor, engine_urls=urls, cluster=self._placement.cluster)
        await self._sync.connect()
        version = 1 if state is None else state["weight_version"]
        await self._sync.publish(version, check=args.check_weight_sync != "never")
        return self

    async def step(self, rollout_id: int) -> dict[str, float]:
        """Rollout `rollout_id` (from 0) and all updates it brings; its figures, logged as step rollout_id + 1."""
        args = self._args
        seconds: dict[str, float] = {}
        started = time.monotonic()
        with _timed(seconds, "rollout_s"):
            rollout = await self._manager.generate.remote(rollout_id)
        batch, figures = rollout["batch"], dict(rollout["metrics"])
        self._prompt_state = rollout["state"]
        with _timed(seconds, "values_s"):
            values, old_log_probs = await asyncio.gather(
                self._critic.compute_values(self._shards(self._critic, batch)),
                self._actor.compute_log_probs(self._shards(self._actor, batch)),
            )
        batch["values"] = [values[index] for index in batch["sample_indices"]]
        batch["old_log_probs"] = [old_log_probs[index] for index in batch["sample_indices"]]
        figures["rollout/log_prob_difference_mean"] = _log_prob_difference(batch)
        batch["advantages"], batch["returns"] = compute_advantages_and_returns(
            batch,
            estimator=args.advantage_estimator,
            gamma=args.gamma,
            lam=args.lambd,
            critic_lam=args.critic_lambd,
            normalize=args.normalize_advantages,
        )
        validate_batch(batch, "policy")
        # Targets and advantages are fixed by now, so neither group waits for the other.
        updates = [self._update_critic(rollout_id, batch, seconds)]
        if rollout_id >= args.num_critic_only_steps:
            updates.append(self._update_actor(rollout_id, batch, seconds))
        for metrics in await asyncio.gather(*updates):
            figures |= metrics
        with _timed(seconds, "sync_s"):
            await self._sync.publish(rollout_id + 2, check=args.check_weight_sync == "always")
        figures["sync/weight_version"] = self._sync.version
        seconds["step_s"] = time.monotonic() - started
        tokens = sum(len(row) for row in batch["tokens"])
        figures["perf/tokens_per_s"] = tokens / seconds["step_s"]
        self._log(rollout_id + 1, figures, seconds)
        return figures

    async def evaluate(self, step: int) -> dict[str, float]:
        """Held-out accuracy of the weights that the engines serve."""
        started = time.monotonic()
        figures = await self._manager.evaluate.remote()
        self._tracker.log(step, "eval", {**figures, "time/eval_s": time.monotonic() - started})
        return figures

    async def save(self, rollout_id: int) -> None:
        """Save actor, critic and prompt source; the state file, written last, makes the save count."""
        args = self._args
        assert args.save is not None and args.critic_save is not None and args.run_dir is not None
        started = time.monotonic()
        iteration = rollout_id + 1
        folders = await asyncio.gather(self._actor.save_model(iteration), self._critic.save_model(iteration))
        run_dir = Path(args.run_dir)
        earlier = read_run_json(run_dir).get("checkpoints", [])
        new = [describe_checkpoint(run_dir, folder) for folder in folders]
        paths = {entry["path"] for entry in new}
        update_run_json(run_dir, checkpoints=[entry for entry in earlier if entry["path"] not in paths] + new)
        publish_json(
            run_dir / STATE_FILE,
            {
                "schema": STATE_SCHEMA,
                "rollout_id": rollout_id,
                "iteration": iteration,
                "weight_version": self._sync.version,
                "prompts": self._prompt_state,
                "actor_checkpoint": new[0],
                "critic_checkpoint": new[1],
            },
        )
        self._tracker.log(iteration, "time", {"time/save_s": time.monotonic() - started})

    async def engine_log_prob_difference(self, rollout_id: int) -> float:
        """Largest difference of the engine's and the actor's log-probs on a fresh rollout, same weights."""
        rollout = await self._manager.generate.remote(rollout_id)
        batch = rollout["batch"]
        ours = await self._actor.compute_log_probs(self._shards(self._actor, batch))
        return _largest_difference(ours, dict(zip(batch["sample_indices"], batch["rollout_log_probs"], strict=True)))

    async def compare_with_saved(self, rollout_id: int) -> tuple[float, float]:
        """Replace both groups by fresh ones that load the last save; largest differences of log-probs and values.

        A check for canaries: what a resumed run would start from answers like what was saved.
        """
        batch = (await self._manager.generate.remote(rollout_id))["batch"]
        before = await self._read(batch)
        self._actor.shutdown()
        self._critic.shutdown()
        assert self._args.run_dir is not None
        state = read_train_state(self._args.run_dir)
        assert state is not None, "compare_with_saved comes after save"
        args = newest_checkpoints(self._args, state)
        self._actor = RayTrainGroup(args, role="actor", placement=self._placement)
        self._critic = RayTrainGroup(args, role="critic", placement=self._placement)
        loaded = await asyncio.gather(self._actor.init(), self._critic.init())
        if any(iteration != state["iteration"] for ranks in loaded for iteration in ranks):
            raise RuntimeError(f"resume loaded iterations {loaded}, the save holds {state['iteration']}")
        after = await self._read(batch)
        return _largest_difference(before[0], after[0]), _largest_difference(before[1], after[1])

    async def _read(self, batch: dict[str, Any]) -> tuple[dict[int, Any], dict[int, Any]]:
        log_probs, values = await asyncio.gather(
            self._actor.compute_log_probs(self._shards(self._actor, batch)),
            self._critic.compute_values(self._shards(self._critic, batch)),
        )
        return log_probs, values

    async def __aexit__(self, *error: object) -> None:
        """End engines; training ranks end with the cluster's job."""
        await self._sync.close()
        if error[0] is None:
            await self._manager.stop.remote()

    # ---------------------------------------------------------------- updates

    async def _update_critic(self, rollout_id: int, batch: Batch, seconds: Figures) -> Figures:
        args = self._args
        results = []
        with _timed(seconds, "critic_s"):
            for epoch in range(args.num_critic_epochs):
                for number, part in enumerate(self._parts(batch)):
                    step = (rollout_id * args.num_critic_epochs + epoch) * args.num_steps_per_rollout + number + 1
                    data = {"data_ref": self._shards(self._critic, part), "sample_indices": part["sample_indices"]}
                    results.append(await self._critic.train(step, data))
        # Every row once, with the values that the advantages were made of: the EV of this batch, not of a part.
        first_epoch = results[: args.num_steps_per_rollout]
        stats = {key: sum(result[key] for result in first_epoch) for key in results[0] if key.startswith("_ev_")}
        ev = explained_variance_from_stats(stats)
        figures = {name: float(np.mean([result[key] for result in results])) for key, name in _CRITIC_METRICS.items()}
        return figures | ({} if ev is None else {"value/explained_variance": ev})

    async def _update_actor(self, rollout_id: int, batch: Batch, seconds: Figures) -> Figures:
        results = []
        with _timed(seconds, "actor_s"):
            for number, part in enumerate(self._parts(batch)):
                step = rollout_id * self._args.num_steps_per_rollout + number + 1
                results.append(await self._actor.train_policy(step, self._shards(self._actor, part)))
        combine = {"ratio_max": np.max, "ratio_min": np.min}
        return {
            name: float(combine.get(key, np.mean)([result[key] for result in results]))
            for key, name in _ACTOR_METRICS.items()
        }

    def _parts(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The batches of the optimizer steps of one rollout, rows in order."""
        size = self._args.global_batch_size
        assert size is not None
        for start in range(0, len(batch["tokens"]), size):
            yield select_rows(batch, range(start, start + size))

    def _shards(self, group: RayTrainGroup, batch: dict[str, Any]) -> list[Box]:
        args = self._critic_args if group.role == "critic" else self._args
        return split_train_data_by_dp(args, batch, dp_size=group.dp_size)

    def _log(self, step: int, figures: dict[str, float], seconds: dict[str, float]) -> None:
        def starting(*prefixes: str) -> dict[str, float]:
            return {name: value for name, value in figures.items() if name.startswith(prefixes)}

        self._tracker.log(step, "rollout", starting("rollout/"))
        self._tracker.log(step, "value", starting("value/"))
        if actor := starting("train/"):
            self._tracker.log(step, "train", actor)
        times = {f"time/{name}": value for name, value in seconds.items()}
        self._tracker.log(step, "time", {**starting("perf/", "sync/"), **times})


def newest_checkpoints(args: Args, state: dict[str, Any]) -> Args:
    """Settings that load exactly what a save wrote, in place of the seeds; a later, unfinished save does not count.

    Raises:
        ValueError: a checkpoint that the state names is missing.
    """
    assert args.save is not None and args.critic_save is not None
    folders = [iteration_folder(folder, state["iteration"]) for folder in (args.save, args.critic_save)]
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder}: missing, though {STATE_FILE} names iteration {state['iteration']}")
    return args.replace(source="resume", load=str(folders[0]), critic_load=str(folders[1]))


def _log_prob_difference(batch: dict[str, Any]) -> float:
    """Mean |trainer - engine| over trainable tokens: how far sampling and training disagree about the same policy."""
    differences = [
        np.abs(np.asarray(ours) - np.asarray(theirs))[np.asarray(mask, dtype=bool)]
        for ours, theirs, mask in zip(
            batch["old_log_probs"], batch["rollout_log_probs"], batch["loss_masks"], strict=True
        )
    ]
    return float(np.concatenate(differences).mean())


def _largest_difference(ours: dict[int, Any], theirs: dict[int, Any]) -> float:
    """Largest absolute difference over all tokens of two results by sample index."""
    assert ours.keys() == theirs.keys()
    return max(float(np.max(np.abs(np.asarray(ours[index]) - np.asarray(theirs[index])))) for index in ours)


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    seconds[name] = time.monotonic() - started
