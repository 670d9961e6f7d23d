"""One online step: rollout, values, critic and actor updates, weights published. And what a resume needs."""

import asyncio
import logging
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import ray
from ray.exceptions import RayTaskError

from miles.algorithms.kl import AdaptiveKLController
from miles.backends.sglang.client import EngineError
from miles.config import Args
from miles.contracts.canonical import sealed
from miles.contracts.chain import describe_checkpoint
from miles.contracts.publish import publish_json
from miles.data.batch import select_rows, validate_batch
from miles.data.sao import refuse_segments, validate_sao_train_data
from miles.ray.actor_group import RayTrainGroup, TrainingRankLost, look_at
from miles.ray.advantages import Advantages, returns_outside
from miles.ray.critic_figures import critic_figures, over_steps
from miles.ray.faults import FaultInjector
from miles.ray.placement_group import Placement, contracted_critic, create_placement
from miles.ray.rollout.engine import EngineGroup
from miles.ray.rollout.manager import create_rollout_manager
from miles.ray.rollout.train_data_conversion import Shard, split_train_data_by_dp
from miles.ray.timeline import Timeline
from miles.ray.train_state import STATE_FILE, STATE_SCHEMA, kl_coef_at, newest_checkpoints, read_train_state
from miles.ray.weight_sync import WeightSync
from miles.rollout.engine_pool import LostEngine
from miles.rollout.inputs import Inputs
from miles.utils.tracking_utils.run_folder import read_run_json, update_run_json
from miles.utils.tracking_utils.tracking import Tracker

logger = logging.getLogger(__name__)

Batch = dict[str, Any]
Figures = dict[str, float]

_NOT_LOGGED = frozenset({"loss", "tokens", "log_prob_difference"})
_NOT_FOR_ACTOR = frozenset({"returns", "values", "kl", "rewards", "failed"})
_NOT_FOR_CRITIC = frozenset(
    {"advantages", "old_log_probs", "rollout_log_probs", "ref_log_probs", "kl", "rewards", "failed", "group_indices"}
)
"""Columns that no pass of a role reads, and that need not travel to its ranks."""
_STAGES = ("rollout", "values", "log_probs", "critic", "actor", "sync")


class OnlineTrainer:
    """Actor group, critic group where the estimator has one, and rollout engines of one run.

    After `step(i)` the engines serve the weights of version i + 2, and everything a resume needs is a function of
    (settings, checkpoints, prompt source state, i). An engine that is lost is replaced without anybody noticing in the
    figures; a training rank that is lost raises `TrainingRankLost`, and `recover` goes back to the last save.
    """

    def __init__(self, args: Args, tracker: Tracker, state: dict[str, Any] | None, inputs: Inputs) -> None:
        """`state`: the save to continue from; None for a fresh run. `inputs`: kept in each save."""
        self._seed_args, self._tracker = args, tracker
        self._inputs = inputs
        self._args, self._critic_args = args, args.for_role("critic")
        self._advantages = Advantages(args)
        self._kl = AdaptiveKLController(
            coef=args.kl_coef,
            target=args.kl_target if args.kl_controller == "adaptive" else None,
            horizon=args.kl_horizon,
        )
        self._faults = FaultInjector(args.faults())
        self._critic: RayTrainGroup | None = None
        self._rank_restarts = 0
        self._losses: asyncio.Task[LostEngine] | None = None
        self._owed: dict[int, LostEngine] = {}
        self._urls: dict[int, str] = {}
        self._asked: tuple[Any, asyncio.Future[Any]] | None = None
        """Call of the rollout side that is under way, and its answer."""
        self._state = state
        self._samples = args.load_rollouts is None
        self._told_of_clamped_returns = False

    # ---------------------------------------------------------------- start, stop, start again

    async def __aenter__(self) -> Self:
        """Reserve devices, start engines and groups side by side, publish the first weights."""
        args = self._args
        devices = {"actor": args.world_size("actor")}
        if args.has_critic:
            devices["critic"] = args.world_size("critic")
        if self._samples:
            devices["rollout"] = args.rollout_num_gpus
        self._placement: Placement = create_placement(args, devices)
        self._engines = EngineGroup(args, self._placement) if self._samples else None
        self._manager = create_rollout_manager(args, self._engines.actors if self._engines else [])
        urls, _ = await asyncio.gather(self._manager.start.remote(), self._start_groups())
        self._urls = dict(enumerate(urls))
        self._first_prompts = await self._manager.state_dict.remote()
        self._sync = None
        if self._samples:
            self._sync = WeightSync(args, actor=self._actor, engine_urls=urls, cluster=self._placement.cluster)
        await self._go_on_from_state()
        logger.info("old log-probs: %s", _origin_of_old_log_probs(args))
        return self

    async def _start_groups(self) -> None:
        """Make the training groups and load the save, or the seeds of a fresh run."""
        state = self._state
        self._args = (
            contracted_critic(self._seed_args) if state is None else newest_checkpoints(self._seed_args, state)
        )
        self._critic_args = self._args.for_role("critic")
        # What a fresh run starts from gives its weights only; a run that goes on keeps its optimizers and schedules.
        fresh = state is None
        self._actor = RayTrainGroup(self._args, role="actor", placement=self._placement, load_weights_only=fresh)
        starting = [self._actor.init()]
        if self._args.has_critic:
            self._critic = RayTrainGroup(self._args, role="critic", placement=self._placement, load_weights_only=fresh)
            starting.append(self._critic.init())
        await asyncio.gather(*starting)

    async def _go_on_from_state(self) -> None:
        """Put prompts, KL coefficient and the engines' weights where the save, or the start, has them."""
        state = self._state
        self._kl.coef = kl_coef_at(self._args, state)
        await self._manager.load_state.remote(self._first_prompts if state is None else state["prompts"])
        if self._sync is not None:
            version = 1 if state is None else state["weight_version"]
            await self._publish(version, check=self._args.check_weight_sync != "never", connect=True)

    async def recover(self, lost: TrainingRankLost) -> int:
        """Start the training groups again from the last save, however often it takes.

        Returns:
            The number of the rollout to go on with.

        Raises:
            RuntimeError: the run has been through as many restarts as it may.
        """
        while True:
            try:
                return await self._start_again(lost)
            except TrainingRankLost as another:
                lost = another

    async def _start_again(self, lost: TrainingRankLost) -> int:
        if self._rank_restarts >= self._args.max_restarts:
            raise RuntimeError(
                f"{lost}; --max-restarts {self._args.max_restarts} allows no other start, --resume goes on from the "
                "last save"
            )
        self._rank_restarts += 1
        assert self._args.run_dir is not None
        await self._abandon_rollout()
        self._state = read_train_state(self._args.run_dir)
        first = 0 if self._state is None else self._state["rollout_id"] + 1
        logger.warning(
            "%s; starting again from %s", lost, f"the save after rollout {first - 1}" if first else "scratch"
        )
        for group in filter(None, (self._actor, self._critic)):
            group.shutdown()
        self._tracker.rewind(first + 1 if first else 0)
        await self._start_groups()
        if self._sync is not None:
            # A rank that died while it sent weights leaves engines in the middle of an update.
            await self._sync.settle()
            self._owed |= {loss.number: loss for loss in await self._sync.lost_engines()}
            for loss in self._owed.values():
                await self._restart_engine(loss)
        await self._go_on_from_state()
        return first

    async def _abandon_rollout(self) -> None:
        """End a call of the rollout side, a rollout or an evaluation: its requests must not go beside later ones."""
        if self._asked is None:
            return
        call, answer = self._asked
        self._asked = None
        ray.cancel(call)
        await asyncio.wait({answer})

    async def __aexit__(self, *error: object) -> None:
        """End engines; training ranks end with the cluster's job."""
        if self._losses is not None:
            self._losses.cancel()
        if self._sync is not None:
            await self._sync.close()
        if error[0] is None:
            await self._manager.stop.remote()

    # ---------------------------------------------------------------- one step

    async def step(self, rollout_id: int) -> dict[str, float]:
        """Rollout `rollout_id` (from 0) and all updates it brings; its figures, logged as step rollout_id + 1."""
        args, step = self._args, rollout_id + 1
        train_actor = rollout_id >= args.num_critic_only_steps
        timeline = Timeline()
        await self._fault("rollout", step)
        with timeline.span("engines", "rollout"):
            batch, figures = await self._rollout(rollout_id)
        figures |= self._skipped_steps(batch, rollout_id)
        refuse_segments(batch, compaction=args.sao_compaction, where=f"rollout {rollout_id}")
        if args.policy_objective == "sao_dis":
            token_mean = args.loss_agg_mode == "token-mean"
            validate_sao_train_data(batch, compaction=args.sao_compaction, calculate_per_token_loss=token_mean)
        await self._read_policies(batch, timeline, step, train_actor=train_actor)
        if "old_log_probs" in batch and not args.use_rollout_logprobs:
            figures["rollout/log_prob_difference_mean"] = _log_prob_difference(batch)
        if "kl" in batch:
            figures["train/kl_reward"] = _token_mean(batch["kl"], batch)
            figures["train/kl_coef"] = self._kl.coef
        await self._fault("advantages", step)
        updates: list[Awaitable[Figures]] = []
        if self._critic is None:
            batch["advantages"], _ = self._advantages(batch, kl_coef=self._kl.coef)
        else:
            # Targets and advantages follow from the same values, and neither group waits for the other; unless the
            # actor is to see what the critic has learned from this very batch.
            batch["advantages"], batch["returns"] = self._advantages(batch, kl_coef=self._kl.coef)
            explained = self._advantages.explained_variance(batch, kl_coef=self._kl.coef)
            figures |= {} if explained is None else {"value/explained_variance": explained}
            figures |= self._clamped_returns(batch, rollout_id)
            await self._fault("critic", step)
            critic = self._update_critic(rollout_id, batch, timeline)
            if args.refresh_values and train_actor:
                figures |= await critic
                with timeline.span("critic", "values"):
                    values = await self._critic.compute_values(self._shards(self._critic, _readable(batch)))
                refreshed = {**batch, "values": _by_sample(values, batch)}
                batch["advantages"], _ = self._advantages(refreshed, kl_coef=self._kl.coef)
            else:
                updates.append(critic)
        validate_batch(batch, "policy")
        if train_actor:
            await self._fault("actor", step)
            updates.append(self._update_actor(rollout_id, batch, timeline))
        for metrics in await asyncio.gather(*updates):
            figures |= metrics
        # Where the policy did not move, its KL says nothing about the coefficient.
        if "kl" in batch and train_actor:
            self._kl.update(kl=figures["train/kl_reward"], num_samples=len(batch["tokens"]))
        await self._fault("sync", step)
        if self._sync is not None:
            with timeline.span("actor", "sync"):
                await self._publish(rollout_id + 2, check=args.check_weight_sync == "always")
            figures["sync/weight_version"] = self._sync.version
        tokens = sum(len(row) for row in batch["tokens"])
        self._log(step, figures, timeline, tokens=tokens)
        return figures

    async def _rollout(self, rollout_id: int, *, keep: bool = True) -> tuple[Batch, Figures]:
        work = asyncio.ensure_future(self._with_engines(self._manager.generate.remote(rollout_id, keep=keep)))
        if self._faults.expects("generate", rollout_id + 1):
            under_way = asyncio.ensure_future(self._manager.first_request.remote())
            await asyncio.wait({work, under_way}, return_when=asyncio.FIRST_COMPLETED)
            await self._fault("generate", rollout_id + 1)
        rollout = await work
        for line in rollout["warnings"]:
            logger.warning("rollout %d: %s", rollout_id, line)
        return rollout["batch"], dict(rollout["metrics"])

    async def _read_policies(self, batch: Batch, timeline: Timeline, step: int, *, train_actor: bool) -> None:
        """Add what critic, old policy and reference say of the batch, where anything reads it."""
        args = self._args
        plain = dict(batch)
        reads: list[Awaitable[None]] = []

        async def read(column: str, lane: str, name: str, values: Any) -> None:
            with timeline.span(lane, name):
                batch[column] = _by_sample(await values, batch)

        # A penalty in the reward is in the critic's targets too, so those need it before the actor is trained.
        penalty = args.kl_coef > 0
        if self._critic is not None:
            await self._fault("values", step)
            reads.append(
                read("values", "critic", "values", self._critic.compute_values(self._shards(self._critic, plain)))
            )
        old = (train_actor or penalty) and not args.use_rollout_logprobs
        old = old and not args.training_forward_gives_old_log_probs
        reference = args.needs_reference and (train_actor or penalty)
        if old or reference:
            await self._fault("log_probs", step)
            shards = self._shards(self._actor, plain)
            if old:
                reads.append(read("old_log_probs", "actor", "log_probs", self._actor.compute_log_probs(shards)))
            if reference:
                reads.append(read("ref_log_probs", "actor", "log_probs", self._actor.compute_ref_log_probs(shards)))
        await asyncio.gather(*reads)
        if args.use_rollout_logprobs:
            batch["old_log_probs"] = batch["rollout_log_probs"]
        if penalty:
            batch["kl"] = self._advantages.penalty(batch)

    async def evaluate(self, step: int) -> dict[str, float]:
        """Held-out accuracy of the weights that the engines serve."""
        await self._fault("eval", step)
        timeline = Timeline()
        with timeline.span("engines", "eval"):
            evaluated = await self._with_engines(self._manager.evaluate.remote())
        for line in evaluated["warnings"]:
            logger.warning("evaluation after step %d: %s", step, line)
        figures: dict[str, float] = evaluated["metrics"]
        self._tracker.log(step, "eval", {**figures, "time/eval_s": timeline.now()})
        return figures

    async def save(self, rollout_id: int) -> None:
        """Save actor, critic and prompt source; the state file, written last, makes the save count."""
        args = self._args
        assert args.save is not None and args.run_dir is not None
        timeline, iteration = Timeline(), rollout_id + 1
        await self._fault("save", iteration)
        groups = [self._actor] if self._critic is None else [self._actor, self._critic]
        folders = await asyncio.gather(*(group.save_model(iteration) for group in groups))
        run_dir = Path(args.run_dir)
        earlier = read_run_json(run_dir).get("checkpoints", [])
        new = [describe_checkpoint(run_dir, folder) for folder in folders]
        paths = {entry["path"] for entry in new}
        update_run_json(run_dir, checkpoints=[entry for entry in earlier if entry["path"] not in paths] + new)
        await self._fault("save_state", iteration)
        state = {
            "schema": STATE_SCHEMA,
            "rollout_id": rollout_id,
            "iteration": iteration,
            "weight_version": iteration + 1,
            "kl_coef": self._kl.coef,
            "settings": self._seed_args.model_dump(mode="json"),
            "inputs": self._inputs,
            "prompts": await self._manager.state_dict.remote(),
            "actor_checkpoint": new[0],
            "critic_checkpoint": new[1] if self._critic is not None else None,
        }
        self._tracker.sync()
        publish_json(run_dir / STATE_FILE, sealed(state))
        self._tracker.log(iteration, "time", {"time/save_s": timeline.now()})
        await self._fault("saved", iteration)

    # ---------------------------------------------------------------- lost engines

    async def _with_engines(self, work: Any) -> Any:
        """Result of a call of the rollout side; engines that are lost meanwhile are replaced."""
        if self._sync is None:
            return await work
        running = asyncio.ensure_future(work)
        # A loss that ends the run, or starts it again, is the reason; what becomes of this call then is none.
        running.add_done_callback(look_at)
        self._asked = work, running
        while not running.done():
            losses = self._losses = self._losses or asyncio.ensure_future(self._manager.next_lost_engine.remote())
            await asyncio.wait({running, losses}, return_when=asyncio.FIRST_COMPLETED)
            if losses.done():
                loss, self._losses = losses.result(), None
                if loss.url != self._urls[loss.number]:
                    continue
                # Until requests are sent again somebody owes the pool an answer, also if a training rank dies now.
                self._owed[loss.number] = loss
                await self._replace_engine(loss)
        self._asked = None
        return await running

    async def _replace_engine(self, loss: LostEngine) -> None:
        """A new server with the current weights, however often it takes."""
        assert self._sync is not None
        while True:
            await self._restart_engine(loss)
            try:
                await self._sync.resend(loss.number)
            except (EngineError, RayTaskError) as error:
                # The actor's side of the transfer may be the first to break.
                if isinstance(error, RayTaskError) and not await self._is_lost(loss.number):
                    await self._actor.raise_if_lost()
                    raise
                await self._sync.settle()
                loss = LostEngine(loss.number, self._urls[loss.number], str(error))
            else:
                await self._tell_restored(loss.number)
                return

    async def _is_lost(self, number: int) -> bool:
        assert self._sync is not None
        return number in {loss.number for loss in await self._sync.lost_engines()}

    async def _restart_engine(self, loss: LostEngine) -> None:
        assert self._engines is not None and self._sync is not None
        logger.warning("engine %d is lost and is started again: %s", loss.number, loss.reason)
        try:
            url = await self._engines.restart(loss.number, loss.reason)
        except (RuntimeError, ValueError) as error:
            await self._manager.give_up_engine.remote(loss.number, str(error))
            raise
        await self._sync.replaced(loss.number, url)
        self._urls[loss.number] = url

    async def _tell_restored(self, number: int) -> None:
        assert self._engines is not None
        await self._manager.engine_restored.remote(number, self._urls[number], self._engines.actors[number])
        self._owed.pop(number, None)

    async def _publish(self, version: int, *, check: bool, connect: bool = False) -> None:
        """Publish the weights, whatever happens to engines meanwhile.

        Args:
            connect: form the group with a new actor group first.
        """
        assert self._sync is not None
        while True:
            try:
                if connect:
                    await self._sync.connect(self._actor)
                await self._sync.publish(version, check=check)
                break
            except (EngineError, RayTaskError) as error:
                lost = await self._sync.lost_engines()
                if not lost:
                    # The engines may only have noticed before we did.
                    await self._actor.raise_if_lost()
                    raise
                logger.warning("publishing weights failed: %s", error)
                for loss in lost:
                    self._owed[loss.number] = loss
                    await self._restart_engine(loss)
                await self._sync.settle()
        for number in list(self._owed):
            await self._tell_restored(number)

    # ---------------------------------------------------------------- faults that tests ask for

    async def _fault(self, stage: str, step: int) -> None:
        await self._faults.at(stage, step, self)

    def kill_rank(self, role: str) -> None:
        """Kill a process of a training group."""
        group = self._actor if role == "actor" else self._critic
        assert group is not None
        group.kill_last_rank()

    async def signal_engine(self, signum: int) -> None:
        """Send a signal to the first engine's server."""
        assert self._engines is not None
        await self._engines.actors[0].signal.remote(signum)

    # ---------------------------------------------------------------- what a canary asks

    async def engine_log_prob_difference(self, rollout_id: int) -> float:
        """Largest difference of the engine's and the actor's log-probs on a fresh rollout, same weights."""
        await self._manager.discard_leftover.remote()
        batch, _ = await self._rollout(rollout_id, keep=False)
        ours = await self._actor.compute_log_probs(self._shards(self._actor, batch))
        return _largest_difference(ours, dict(zip(batch["sample_indices"], batch["rollout_log_probs"], strict=True)))

    async def compare_with_saved(self, rollout_id: int) -> tuple[float, float]:
        """Replace the groups by fresh ones that load the last save; largest differences of log-probs and values.

        A check for canaries: what a resumed run would start from answers like what was saved.
        """
        batch, _ = await self._rollout(rollout_id, keep=False)
        before = await self._read(batch)
        assert self._args.run_dir is not None
        self._state = read_train_state(self._args.run_dir)
        assert self._state is not None, "compare_with_saved comes after save"
        for group in filter(None, (self._actor, self._critic)):
            group.shutdown()
        await self._start_groups()
        after = await self._read(batch)
        return _largest_difference(before[0], after[0]), _largest_difference(before[1], after[1])

    async def _read(self, batch: Batch) -> tuple[dict[int, Any], dict[int, Any]]:
        async def values() -> dict[int, Any]:
            return {} if self._critic is None else await self._critic.compute_values(self._shards(self._critic, batch))

        log_probs, read = await asyncio.gather(
            self._actor.compute_log_probs(self._shards(self._actor, batch)), values()
        )
        return log_probs, read

    # ---------------------------------------------------------------- updates

    async def _update_critic(self, rollout_id: int, batch: Batch, timeline: Timeline) -> Figures:
        args, critic = self._args, self._critic
        assert critic is not None
        results = []
        with timeline.span("critic", "critic"):
            for epoch in range(args.num_critic_epochs):
                for number, part in self._parts(batch):
                    step = (rollout_id * args.num_critic_epochs + epoch) * args.num_steps_per_rollout + number + 1
                    data = {"data_ref": self._shards(critic, part), "sample_indices": part["sample_indices"]}
                    results.append(await critic.train(step, data))
        return critic_figures(results)

    async def _update_actor(self, rollout_id: int, batch: Batch, timeline: Timeline) -> Figures:
        results = []
        own_old_log_probs = "old_log_probs" not in batch or self._args.use_rollout_logprobs
        with timeline.span("actor", "actor"):
            for number, part in self._parts(batch):
                step = rollout_id * self._args.num_steps_per_rollout + number + 1
                results.append(await self._actor.train_policy(step, self._shards(self._actor, part)))
        figures: Figures = {}
        for key in (key for key in results[0] if key not in _NOT_LOGGED):
            figures[f"train/{key}"] = over_steps(results, key)
        # Only the first step sees the weights that sampled.
        if (difference := results[0].get("log_prob_difference")) is not None and own_old_log_probs:
            figures["rollout/log_prob_difference_mean"] = difference
        return figures

    def _steps(self, batch: Batch) -> Iterator[tuple[int, range]]:
        """Numbers, from 0, and rows of the optimizer steps of one rollout; those without a trainable token are left
        out.
        """
        count = len(batch["tokens"])
        size = count if self._args.use_dynamic_global_batch_size else self._args.global_batch_size
        assert size is not None
        for number, start in enumerate(range(0, count, size)):
            rows = range(start, start + size)
            if any(np.any(batch["loss_masks"][row]) for row in rows):
                yield number, rows

    def _parts(self, batch: Batch) -> Iterator[tuple[int, Batch]]:
        """The batches of those steps, with their numbers."""
        return ((number, select_rows(batch, rows)) for number, rows in self._steps(batch))

    def _skipped_steps(self, batch: Batch, rollout_id: int) -> Figures:
        """How many optimizer steps have nothing to train on, where there are any, with a warning.

        Neither group makes them, so their learning rates do not move on either; what a save holds says so.

        Raises:
            ValueError: no step has anything: who scores is down, and to go on would use up prompts for nothing.
        """
        made = {number for number, _ in self._steps(batch)}
        count = self._args.num_steps_per_rollout
        skipped = [str(number + 1) for number in range(count) if number not in made]
        if not made:
            raise ValueError(
                f"rollout {rollout_id}: nothing to train on: each of its {len(batch['tokens'])} samples is without a "
                "reward (late or failed) or without a token that the loss counts"
            )
        if not skipped:
            return {}
        logger.warning(
            "rollout %d: of its %d optimizer steps number %s is skipped: each of its samples is without a reward "
            "(late or failed) or without a token that the loss counts",
            rollout_id,
            count,
            ", ".join(skipped),
        )
        return {"rollout/skipped_steps": len(skipped)}

    def _clamped_returns(self, batch: Batch, rollout_id: int) -> Figures:
        """Share of the targets that a classifying critic's bins cannot express, where the KL is in the reward.

        Raises:
            ValueError: there is no penalty, and yet such a target.
        """
        if self._args.value_loss_type != "classification":
            return {}
        low, high = self._args.value_reward_range
        fraction, example = returns_outside(batch, (low, high))
        told = f"rollout {rollout_id}: {example} lies outside --value-reward-range {low} {high}, the critic's bins"
        if "kl" not in batch:
            if example is not None:
                raise ValueError(f"{told}, which must hold every return")
            return {}
        if example is not None and not self._told_of_clamped_returns:
            self._told_of_clamped_returns = True
            logger.warning("%s: it is learned as the nearer end, see value/clamped_fraction", told)
        return {"value/clamped_fraction": fraction}

    def _shards(self, group: RayTrainGroup, batch: Batch) -> list[Shard]:
        critic = group.role == "critic"
        unread = _NOT_FOR_CRITIC if critic else _NOT_FOR_ACTOR
        columns = {name: column for name, column in batch.items() if name not in unread}
        return split_train_data_by_dp(self._critic_args if critic else self._args, columns, dp_size=group.dp_size)

    # ---------------------------------------------------------------- figures

    def _log(self, step: int, figures: Figures, timeline: Timeline, *, tokens: int) -> None:
        """Write the figures of a step, by stage, with where its time went."""

        def starting(*prefixes: str) -> dict[str, Any]:
            return {name: value for name, value in figures.items() if name.startswith(prefixes)}

        whole = timeline.now()
        times: dict[str, Any] = {"time/step_s": whole, "perf/tokens_per_s": tokens / whole}
        for stage in _STAGES:
            if (seconds := timeline.seconds(stage)) is not None:
                times[f"time/{stage}_s"] = seconds
        sampling = timeline.busy("engines") * (1.0 - figures.get("rollout/engine_idle_fraction", 0.0))
        lanes = {"actor": timeline.busy("actor")}
        if self._critic is not None:
            lanes["critic"] = timeline.busy("critic")
        if self._sync is not None:
            lanes["engines"] = sampling
        times |= {f"idle/{lane}": 1.0 - busy / whole for lane, busy in lanes.items()}
        self._tracker.log(step, "rollout", starting("rollout/"))
        if value := starting("value/"):
            self._tracker.log(step, "value", value)
        if actor := starting("train/"):
            self._tracker.log(step, "train", actor)
        self._tracker.log(step, "time", {**starting("sync/"), **times, "timeline": timeline.to_json()})


def _origin_of_old_log_probs(args: Args) -> str:
    if args.policy_objective == "sao_dis" or args.use_rollout_logprobs:
        return "the engine's, as sampled"
    if args.training_forward_gives_old_log_probs:
        return "those of the training forward pass, one optimizer step per rollout"
    return "the trainer's, read before the first optimizer step of a rollout"


def _readable(batch: Batch) -> Batch:
    """The columns that a pass which only reads needs."""
    return {name: batch[name] for name in ("tokens", "response_lengths", "loss_masks", "sample_indices")}


def _by_sample(numbers: dict[int, Any], batch: Batch) -> list[Any]:
    return [numbers[index] for index in batch["sample_indices"]]


def _token_mean(column: list[Any], batch: Batch) -> float:
    """Mean over the trainable tokens."""
    return float(np.concatenate(column)[np.concatenate(batch["loss_masks"]).astype(bool)].mean())


def _log_prob_difference(batch: Batch) -> float:
    """Mean |trainer - engine| over trainable tokens: how far sampling and training disagree about the same policy."""
    ours, theirs = np.concatenate(batch["old_log_probs"]), np.concatenate(batch["rollout_log_probs"])
    return _token_mean([np.abs(ours - theirs)], batch)


def _largest_difference(ours: dict[int, Any], theirs: dict[int, Any]) -> float:
    """Largest absolute difference over all tokens of two results by sample index; 0 of none."""
    assert ours.keys() == theirs.keys()
    differences = (float(np.max(np.abs(np.asarray(ours[index]) - np.asarray(theirs[index])))) for index in ours)
    return max(differences, default=0.0)
