"""The rollout side in one place: prompts, engines, rewards, and the batch that training sees."""

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray

from miles.backends.sglang.client import SGLangClient
from miles.config import Args
from miles.contracts.publish import publish_bytes
from miles.data.batch import samples_to_batch
from miles.data.prompts import PromptRow, PromptSource
from miles.data.sample import TRAINABLE_STATUSES, Sample, SampleStatus
from miles.reporting.wilson import wilson_interval
from miles.rollout.generation import generate_samples
from miles.rollout.rewards import load_function, score_samples
from miles.utils.logging_utils import configure_logger

logger = logging.getLogger(__name__)

_EVAL_ID = -1
"""Takes the place of the rollout id in the seeds of evaluation samples, so that every evaluation draws the same."""


class RolloutManager:
    """Turns prompts into scored samples.

    Order and seeds of the samples follow from `rollout_seed`, the rollout id and a sample's index alone, so a resumed
    run sees what the interrupted one would have seen.
    """

    def __init__(self, args: Args, engines: list[Any]) -> None:
        configure_logger(args, source="rollout")
        self._args = args
        self._engines = engines
        self._clients: list[SGLangClient] = []

    async def start(self) -> list[str]:
        """Read prompts, tokenizer and reward function, start the engines (all at once); their URLs.

        Raises:
            ValueError: a file, the tokenizer or the reward function is unusable, or an engine did not start.
        """
        args = self._args
        starting = [engine.start.remote() for engine in self._engines]
        from transformers import AutoTokenizer

        assert args.custom_rm_path is not None and args.hf_checkpoint is not None
        self._tokenizer = AutoTokenizer.from_pretrained(args.hf_checkpoint)
        self._reward = load_function(args.custom_rm_path)
        self._prompts = self._source(args.prompt_data, shuffle=args.rollout_shuffle)
        self._eval_prompts = None if not args.eval_prompt_data else self._source(args.eval_sets()[0].path)
        urls = list(await asyncio.gather(*starting))
        vocab_size = json.loads((Path(args.hf_checkpoint) / "config.json").read_text())["vocab_size"]
        self._clients = [
            SGLangClient(url, timeout_s=args.sglang_request_timeout_s, vocab_size=vocab_size) for url in urls
        ]
        return urls

    def _source(self, path: str | None, *, shuffle: bool = False) -> PromptSource:
        assert path is not None
        args = self._args
        return PromptSource(
            path,
            tokenizer=self._tokenizer,
            input_key=args.input_key,
            label_key=args.label_key,
            metadata_key=args.metadata_key,
            apply_chat_template=args.apply_chat_template,
            max_prompt_len=args.rollout_max_prompt_len,
            shuffle=shuffle,
            seed=args.rollout_seed,
        )

    async def stop(self) -> None:
        """Close connections and end the servers."""
        for client in self._clients:
            await client.close()
        for engine in self._engines:
            await engine.stop.remote()

    # ---------------------------------------------------------------- samples

    async def generate(self, rollout_id: int) -> dict[str, Any]:
        """Sample and score one rollout; keep it in the run folder.

        Returns:
            "batch": the column batch; "metrics": figures by their stable names; "state": the prompt source after it.

        Raises:
            ValueError: a reward that is none, a prompt that does not fit.
            RuntimeError: an engine that died, or samples that did not finish.
        """
        args = self._args
        assert args.rollout_batch_size is not None
        rows = self._prompts.get(args.rollout_batch_size)
        first_group = rollout_id * args.rollout_batch_size
        samples = [
            _sample(row, index=(first_group + group) * args.n_samples_per_prompt + member, group=first_group + group)
            for group, (_, row) in enumerate(rows)
            for member in range(args.n_samples_per_prompt)
        ]
        started = time.monotonic()
        await self._run(samples, rollout_id=rollout_id, temperature=args.rollout_temperature)
        seconds = time.monotonic() - started
        unfinished = [sample for sample in samples if sample.status not in TRAINABLE_STATUSES]
        if unfinished:
            raise RuntimeError(
                f"rollout {rollout_id}: {len(unfinished)} of {len(samples)} samples did not finish; "
                f"sample {unfinished[0].index} is {unfinished[0].status.value}"
            )
        self._keep(samples, rollout_id)
        lengths = [sample.response_length for sample in samples]
        rewards = [float(sample.reward or 0.0) for sample in samples]
        metrics = {
            "rollout/reward_mean": float(np.mean(rewards)),
            "rollout/response_length_mean": float(np.mean(lengths)),
            "rollout/truncated_fraction": _share(samples, SampleStatus.TRUNCATED),
            "rollout/count": len(samples),
            "rollout/tokens_per_s": sum(lengths) / seconds,
        }
        return {"batch": samples_to_batch(samples), "metrics": metrics, "state": self._prompts.state_dict()}

    async def evaluate(self) -> dict[str, float]:
        """Accuracy on the held-out prompts (share of samples with reward 1) with its Wilson interval."""
        args = self._args
        assert self._eval_prompts is not None
        count = min(len(self._eval_prompts), args.eval_max_prompts or len(self._eval_prompts))
        samples = [
            _sample(self._eval_prompts[row], index=row * args.n_samples_per_eval_prompt + member, group=row)
            for row in range(count)
            for member in range(args.n_samples_per_eval_prompt)
        ]
        await self._run(samples, rollout_id=_EVAL_ID, temperature=args.eval_temperature)
        right = sum(sample.reward == 1.0 for sample in samples)
        low, high = wilson_interval(right, len(samples))
        return {
            "eval/accuracy": right / len(samples),
            "eval/accuracy_low": low,
            "eval/accuracy_high": high,
            "eval/count": len(samples),
            "eval/reward_mean": float(np.mean([sample.reward or 0.0 for sample in samples])),
            "eval/truncated_fraction": _share(samples, SampleStatus.TRUNCATED),
        }

    async def _run(self, samples: list[Sample], *, rollout_id: int, temperature: float) -> None:
        args = self._args
        for sample in samples:
            sample.rollout_id = rollout_id
        await generate_samples(
            samples, clients=self._clients, args=args, rollout_id=rollout_id, temperature=temperature
        )
        for sample in samples:
            sample.response = self._tokenizer.decode(sample.response_tokens, skip_special_tokens=True)
        finished = [sample for sample in samples if sample.status in TRAINABLE_STATUSES]
        await score_samples(finished, reward_fn=self._reward, timeout_s=args.rm_timeout_s)

    def _keep(self, samples: list[Sample], rollout_id: int) -> None:
        if self._args.run_dir is None:
            return
        folder = Path(self._args.run_dir) / "rollouts"
        folder.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(sample.to_dict()) + "\n" for sample in samples)
        publish_bytes(folder / f"rollout_{rollout_id:06d}.jsonl", lines.encode())

    # ---------------------------------------------------------------- resuming

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue the prompt source where `state` stood."""
        self._prompts.load_state_dict(state)


def _sample(row: PromptRow, *, index: int, group: int) -> Sample:
    return Sample(
        index=index,
        group_index=group,
        rollout_id=0,
        prompt=row.prompt,
        tokens=list(row.tokens),
        label=row.label,
        metadata=dict(row.metadata or {}),
    )


def _share(samples: list[Sample], status: SampleStatus) -> float:
    return sum(sample.status is status for sample in samples) / len(samples)


def create_rollout_manager(args: Args, engines: list[Any]) -> Any:
    """The manager as a Ray actor; it takes no device."""
    env = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return ray.remote(RolloutManager).options(num_cpus=0, runtime_env={"env_vars": env}).remote(args, engines)
