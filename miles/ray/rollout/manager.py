"""The rollout side in one place: prompts, engines, rewards, and the batch that training sees."""

import asyncio
import json
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from miles.backends.sglang.client import SGLangClient
from miles.config import Args
from miles.config.eval_sets import EvalSet, Sampling
from miles.config.hf_folder import read_model_config
from miles.contracts.publish import publish_bytes
from miles.data.batch import samples_to_batch
from miles.data.prompts import PromptSource
from miles.data.sample import TRAINABLE_STATUSES, Sample, SampleStatus, read_samples
from miles.ray.cluster import device_kind
from miles.ray.driver_folder import driver_folder_env, enter_driver_folder
from miles.reporting.wilson import wilson_interval
from miles.rollout.engine_pool import EnginePool, LostEngine
from miles.rollout.filters import load_filter
from miles.rollout.generation import generate_samples
from miles.rollout.groups import GroupSource, collect_groups, sample_of
from miles.rollout.preflight import rollout_file
from miles.rollout.reward_calls import RewardFunction
from miles.rollout.rewards import score_samples
from miles.utils.logging_utils import configure_logger

logger = logging.getLogger(__name__)

_EVAL_ID = -1
"""Takes the place of the rollout id in the seeds of the first evaluation set's samples, so that every evaluation draws
the same; the sets after it count down."""

_MAX_WARNINGS = 10
_POLL_S = 0.005


class RolloutManager:
    """Turns prompts into scored samples, or reads those that an earlier run kept (`--load-rollouts`).

    Order and seeds of the samples follow from `rollout_seed`, the rollout id and a sample's index alone, so a resumed
    run sees what the interrupted one would have seen.
    """

    def __init__(self, args: Args, engines: list[Any]) -> None:
        enter_driver_folder()
        configure_logger(args, source="rollout")
        self._args = args
        self._engines = engines
        self._notes: list[str] = []

    async def start(self) -> list[str]:
        """Read prompts, tokenizer and reward function, start the engines (all at once); their URLs.

        Raises:
            ValueError: a file, the tokenizer or a function is unusable, a prompt is too long, or an engine did not
            start.
        """
        args = self._args
        if args.load_rollouts is not None:
            return []
        starting = [engine.start.remote() for engine in self._engines]
        from transformers import AutoTokenizer

        assert args.custom_rm_path is not None and args.hf_checkpoint is not None and args.prompt_data is not None
        config = read_model_config(args.hf_checkpoint)
        self._tokenizer = AutoTokenizer.from_pretrained(args.hf_checkpoint)
        self._reward = RewardFunction(args.custom_rm_path, concurrency=args.rm_concurrency, flag="--custom-rm-path")
        filter_path = args.dynamic_sampling_filter_path
        self._keep = None if filter_path is None else load_filter(filter_path, timeout_s=args.rm_timeout_s)
        limit = _prompt_limit(args, config, args.rollout_max_response_len, trained=True)
        prompts = self._prompts(args.prompt_data, limit, shuffle=args.rollout_shuffle)
        self._source = GroupSource(prompts, samples_per_prompt=args.n_samples_per_prompt)
        self._eval_sets = [
            (one, self._prompts(one.path, _prompt_limit(args, config, one.sampling.max_response_len, trained=False)))
            for one in args.eval_sets()
        ]
        urls = list(await asyncio.gather(*starting))
        self._vocab_size = config["vocab_size"]
        self._pool = EnginePool([self._client(url) for url in urls], health_timeout_s=args.sglang_health_timeout_s)
        return urls

    def _client(self, url: str) -> SGLangClient:
        return SGLangClient(url, timeout_s=self._args.sglang_request_timeout_s, vocab_size=self._vocab_size)

    def _prompts(self, path: str, limit: int | None, *, shuffle: bool = False) -> PromptSource:
        args = self._args
        source = PromptSource(
            path,
            tokenizer=self._tokenizer,
            input_key=args.input_key,
            label_key=args.label_key,
            metadata_key=args.metadata_key,
            apply_chat_template=args.apply_chat_template,
            max_prompt_len=limit,
            overlong=args.overlong_prompts,
            shuffle=shuffle,
            seed=args.rollout_seed,
        )
        if source.num_dropped:
            self._notes.append(
                f"{path}: {source.num_dropped} of {source.num_dropped + len(source)} prompts are longer than {limit} "
                "tokens and left out (--overlong-prompts drop)"
            )
        return source

    async def stop(self) -> None:
        """Close connections and end the servers."""
        if self._args.load_rollouts is None:
            await self._pool.close()
            self._reward.close()
        for engine in self._engines:
            await engine.stop.remote()

    # ---------------------------------------------------------------- lost engines

    async def next_lost_engine(self) -> LostEngine:
        """The next engine that is lost; the caller replaces it and says `engine_restored`, or `give_up_engine`."""
        return await self._pool.next_lost()

    async def engine_restored(self, number: int, url: str, engine: Any) -> None:
        """Engine `number` is now the server at `url`, kept by the Ray actor `engine`; it has the current weights."""
        self._engines[number] = engine
        await self._pool.restored(number, self._client(url))

    def give_up_engine(self, number: int, reason: str) -> None:
        """Engine `number` will not come back: its requests fail."""
        self._pool.engines[number].give_up(reason)

    async def first_request(self) -> None:
        """Wait until the first engine works on a request."""
        while not self._pool.engines[0].num_in_flight:
            await asyncio.sleep(_POLL_S)

    # ---------------------------------------------------------------- samples

    async def generate(self, rollout_id: int, *, keep: bool = True) -> dict[str, Any]:
        """Sample and score one rollout and keep it in the run folder; or read it where rollouts are loaded.

        Args:
            keep: it is trained on; one that something is only compared on stays in no folder.

        Returns:
            "batch": the column batch; "metrics": figures by their stable names; "warnings": lines for the user, who
            does not see what this process logs.

        Raises:
            ValueError: a reward that is none, a prompt that does not fit.
            RuntimeError: an engine that died and is not replaced, or samples that did not finish.
        """
        if self._args.load_rollouts is not None:
            samples = self._kept_rollout(Path(self._args.load_rollouts), rollout_id)
            return {"batch": samples_to_batch(samples), "metrics": _rollout_metrics(samples), "warnings": []}
        samples, failures, metrics = await self._sample_rollout(rollout_id)
        if keep:
            self._keep_samples(samples, rollout_id)
        warnings = self._take_notes() + _shortened([f"{failure}; not trained on" for failure in failures])
        if filled := metrics.get("rollout/groups_filled_up"):
            warnings.append(f"{filled:.0f} filtered groups fill up: --dynamic-sampling-max-replacements is reached")
        return {"batch": samples_to_batch(samples), "metrics": metrics, "warnings": warnings}

    def _take_notes(self) -> list[str]:
        notes, self._notes = self._notes, []
        return notes

    async def _sample_rollout(self, rollout_id: int) -> tuple[list[Sample], list[str], dict[str, float]]:
        """The samples to train on, why any that was sampled has no reward, and figures."""
        args = self._args
        assert args.rollout_batch_size is not None and args.over_sampling_batch_size is not None
        assert args.dynamic_sampling_max_replacements is not None
        started, busy_before = time.monotonic(), self._pool.busy_seconds()
        resent_before = self._num_resent()
        sampled_tokens = 0
        failures: list[str] = []
        rewards: list[float] = []

        async def sample(samples: list[Sample]) -> None:
            nonlocal sampled_tokens
            await self._run(samples, rollout_id=rollout_id)
            sampled_tokens += sum(one.response_length for one in samples)
            failures.extend(one.metadata["failure"] for one in samples if one.status is SampleStatus.FAILED)
            rewards.extend(one.reward for one in samples if one.reward is not None)

        collected = await collect_groups(
            self._source,
            sample,
            rollout_id=rollout_id,
            wanted=args.rollout_batch_size,
            # Without a filter nothing needs replacing: what is sampled beyond would only grow stale.
            at_first=args.rollout_batch_size if self._keep is None else args.over_sampling_batch_size,
            keep=self._keep,
            max_replacements=args.dynamic_sampling_max_replacements,
        )
        seconds = time.monotonic() - started
        samples = [member for group in collected.groups for member in group]
        unfinished = [one for one in samples if one.status not in TRAINABLE_STATUSES | {SampleStatus.FAILED}]
        if unfinished:
            raise RuntimeError(
                f"rollout {rollout_id}: {len(unfinished)} of {len(samples)} samples did not finish; "
                f"sample {unfinished[0].index} is {unfinished[0].status.value}"
            )
        busy = [after - before for after, before in zip(self._pool.busy_seconds(), busy_before, strict=True)]
        metrics = {
            **_rollout_metrics(samples),
            "rollout/tokens_per_s": sampled_tokens / seconds,
            "rollout/engine_idle_fraction": max(0.0, 1.0 - float(np.mean(busy)) / seconds),
        }
        if self._keep is not None:
            if rewards:
                # Groups come in any order, which an exact sum does not show.
                metrics["rollout/sampled_reward_mean"] = math.fsum(rewards) / len(rewards)
            metrics["rollout/groups_sampled"] = collected.num_sampled
            metrics["rollout/groups_filtered"] = collected.num_filtered
            metrics["rollout/groups_left_over"] = collected.num_left_over
            metrics["rollout/groups_filled_up"] = collected.num_filled_up
            metrics["rollout/unscored_replaced"] = len(failures) - metrics["rollout/unscored"]
        if resent := self._num_resent() - resent_before:
            metrics["rollout/requests_resent"] = resent
        return samples, failures, metrics

    def _num_resent(self) -> int:
        return sum(engine.num_resent for engine in self._pool.engines)

    async def evaluate(self) -> dict[str, Any]:
        """Accuracy of every held-out set (share of scored answers with reward 1) with its Wilson interval, and more.

        Returns:
            "metrics" and "warnings", as `generate` does.

        Raises:
            RuntimeError: a set without any scored answer.
        """
        figures: dict[str, float] = {}
        failures: list[str] = []
        # One set after the other: requests that run together should agree in how they are sampled.
        for number, (one, prompts) in enumerate(self._eval_sets):
            count = min(len(prompts), one.sampling.max_prompts or len(prompts))
            samples = [
                sample_of(
                    prompts[row], index=row * one.sampling.n_samples + member, group=row, rollout_id=_EVAL_ID - number
                )
                for row in range(count)
                for member in range(one.sampling.n_samples)
            ]
            await self._run(samples, rollout_id=_EVAL_ID - number, sampling=one.sampling)
            figures |= _eval_metrics(one, samples)
            failures += [_why_unscored(answer) for answer in samples if answer.reward is None]
        warnings = self._take_notes() + _shortened([f"{failure}; not counted" for failure in failures])
        return {"metrics": figures, "warnings": warnings}

    async def _run(self, samples: list[Sample], *, rollout_id: int, sampling: Sampling | None = None) -> None:
        """Generate and score, in place."""
        args = self._args
        own = {}
        if sampling is not None:
            own = {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "max_new_tokens": sampling.max_response_len,
            }

        await generate_samples(samples, clients=self._pool.engines, args=args, rollout_id=rollout_id, **own)
        for sample in samples:
            sample.response = self._tokenizer.decode(sample.response_tokens, skip_special_tokens=True)
        finished = [sample for sample in samples if sample.status in TRAINABLE_STATUSES]
        await score_samples(
            finished,
            self._reward,
            timeout_s=args.rm_timeout_s,
            concurrency=args.rm_concurrency,
            on_timeout=args.rm_on_timeout,
            on_error=args.rm_on_error,
        )

    # ---------------------------------------------------------------- kept rollouts

    def _keep_samples(self, samples: list[Sample], rollout_id: int) -> None:
        if self._args.run_dir is None:
            return
        folder = Path(self._args.run_dir) / "rollouts"
        folder.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(sample.to_dict()) + "\n" for sample in samples)
        publish_bytes(rollout_file(folder, rollout_id), lines.encode())

    def _kept_rollout(self, folder: Path, rollout_id: int) -> list[Sample]:
        args = self._args
        path = rollout_file(folder, rollout_id)
        samples = read_samples(path)
        assert args.rollout_batch_size is not None
        expected = args.rollout_batch_size * args.n_samples_per_prompt
        if not args.use_dynamic_global_batch_size and len(samples) != expected:
            raise ValueError(
                f"{path}: {len(samples)} samples, --rollout-batch-size {args.rollout_batch_size} x "
                f"--n-samples-per-prompt {args.n_samples_per_prompt} is {expected}"
            )
        return samples

    def discard_leftover(self) -> None:
        """Forget groups that are left over, so that the next rollout is of the current weights alone."""
        self._source.take_leftover(self._source.num_leftover)

    # ---------------------------------------------------------------- resuming

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs of the rollout side: where the prompts stand, and sampled groups left over."""
        return {} if self._args.load_rollouts is not None else self._source.state_dict()

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        if self._args.load_rollouts is None:
            self._source.load_state_dict(state)


def _prompt_limit(args: Args, config: dict[str, Any], max_response_len: int | None, *, trained: bool) -> int | None:
    """Longest prompt that leaves room for a response in the model, the engine's cache and a micro-batch.

    Args:
        trained: prompt and response are trained on, so a micro-batch must hold them.

    Returns:
        Its tokens, None where nothing bounds them.
    """
    assert max_response_len is not None
    rooms = [config.get("max_position_embeddings"), args.engine_cache_tokens(args.device)]
    if trained and args.max_tokens_per_gpu is not None:
        rooms.append(args.max_tokens_per_gpu * args.context_parallel_size)
    limits = [room - max_response_len for room in rooms if room is not None]
    if args.rollout_max_prompt_len is not None:
        limits.append(args.rollout_max_prompt_len)
    return min(limits, default=None)


def _rollout_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    lengths = np.array([sample.response_length for sample in samples])
    scored = [sample for sample in samples if sample.reward is not None]
    if not scored:
        raise RuntimeError(f"no sample of {len(samples)} has a reward; the first: {_why_unscored(samples[0])}")
    rewards = np.array([sample.reward for sample in scored], dtype=np.float64)
    groups: dict[int, list[float]] = {}
    for sample in scored:
        groups.setdefault(sample.group_index, []).append(float(sample.reward or 0.0))
    newest = max((int(version) for s in samples for version in s.weight_versions if version.isdigit()), default=0)
    metrics = {
        "rollout/reward_mean": float(rewards.mean()),
        "rollout/reward_std": float(rewards.std()),
        "rollout/reward_min": float(rewards.min()),
        "rollout/reward_max": float(rewards.max()),
        "rollout/response_length_mean": float(lengths.mean()),
        "rollout/response_length_max": int(lengths.max()),
        "rollout/truncated_fraction": _share(samples, SampleStatus.TRUNCATED),
        "rollout/count": len(samples),
        "rollout/unscored": len(samples) - len(scored),
        "rollout/stale_fraction": float(
            np.mean([any(v.isdigit() and int(v) < newest for v in s.weight_versions) for s in samples])
        ),
    }
    if len(groups) < len(scored):
        metrics["rollout/equal_reward_groups"] = float(np.mean([len(set(group)) == 1 for group in groups.values()]))
    return metrics


def _eval_metrics(one: EvalSet, samples: Sequence[Sample]) -> dict[str, float]:
    scored = [sample for sample in samples if sample.reward is not None]
    if not scored:
        which, why = one.name or one.path, _why_unscored(samples[0])
        raise RuntimeError(f"evaluation set {which}: no answer of {len(samples)} has a reward; the first: {why}")
    right = sum(sample.reward == 1.0 for sample in scored)
    low, high = wilson_interval(right, len(scored))
    figures = {
        "accuracy": right / len(scored),
        "accuracy_low": low,
        "accuracy_high": high,
        "count": len(scored),
        "unscored": len(samples) - len(scored),
        "reward_mean": float(np.mean([sample.reward or 0.0 for sample in scored])),
        "response_length_mean": float(np.mean([sample.response_length for sample in scored])),
        "truncated_fraction": _share(scored, SampleStatus.TRUNCATED),
    }
    return {one.metric(name): value for name, value in figures.items()}


def _why_unscored(sample: Sample) -> str:
    return sample.metadata.get("failure", f"sample {sample.index} is {sample.status.value}")


def _shortened(lines: list[str]) -> list[str]:
    if len(lines) <= _MAX_WARNINGS:
        return lines
    return [*lines[: _MAX_WARNINGS - 1], f"... {len(lines) - _MAX_WARNINGS + 1} more samples without a reward"]


def _share(samples: Sequence[Sample], status: SampleStatus) -> float:
    return sum(sample.status is status for sample in samples) / len(samples)


def create_rollout_manager(args: Args, engines: list[Any]) -> Any:
    """The manager as a Ray actor; it takes no device, but must know which kind the engines have."""
    env = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | driver_folder_env()
    args = args.replace(source="cluster", device=device_kind(args))
    return ray.remote(RolloutManager).options(num_cpus=0, runtime_env={"env_vars": env}).remote(args, engines)
