"""Responses for samples: token ids to an engine, token ids and their log-probabilities back."""

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

from miles.backends.sglang.client import EngineRefused, GenerateResult, SamplingParams
from miles.data.sample import Sample, SampleStatus

_STATUS = {"stop": SampleStatus.COMPLETED, "length": SampleStatus.TRUNCATED, "abort": SampleStatus.ABORTED}


class Engine(Protocol):
    """What samples are sent to: a client, or an engine of a pool."""

    async def generate(self, input_ids: Sequence[int], sampling: SamplingParams) -> GenerateResult: ...


def sampling_seed(*, rollout_seed: int, rollout_id: int, sample_index: int) -> int:
    """Seed of one sample in 0..2**63-1: a hash, so equal on every machine and unrelated between neighbours."""
    digest = hashlib.sha256(f"miles/sampling/{rollout_seed}/{rollout_id}/{sample_index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


async def generate_samples(
    samples: Sequence[Sample],
    *,
    clients: Sequence[Engine],
    args: Any,
    rollout_id: int,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    max_new_tokens: int | None = None,
    concurrency: int = 256,
) -> None:
    """Sample a response for every sample, in place.

    Adds tokens with the log-probabilities under which they were sampled, the status (COMPLETED: a stop token,
    TRUNCATED: the length limit, ABORTED: ended from outside, with the tokens so far) and the weight versions. A sample
    that holds a partial response already is continued. Samples of one group go to one engine, which then shares their
    prompt.

    Args:
        clients: one for each engine.
        args: reads rollout_seed, rollout_temperature, rollout_top_p, rollout_top_k, rollout_max_response_len and
            rollout_stop_token_ids (see `miles.config`).
        rollout_id: enters the seeds; not stored in the samples.
        temperature, top_p, top_k, max_new_tokens: in place of those of `args`.
        concurrency: requests at once, on all engines together.

    Raises:
        ValueError: a prompt that an engine refuses; the line names the sample.
        EngineError: an engine is gone or stuck. All other requests are cancelled first.
    """
    if not clients:
        raise ValueError("generate_samples needs at least one engine client")
    limit = args.rollout_max_response_len if max_new_tokens is None else max_new_tokens
    heat = args.rollout_temperature if temperature is None else temperature
    gate = asyncio.Semaphore(concurrency)

    async def run(sample: Sample) -> None:
        sampling = SamplingParams(
            max_new_tokens=limit - sample.response_length,
            temperature=heat,
            top_p=args.rollout_top_p if top_p is None else top_p,
            top_k=args.rollout_top_k if top_k is None else top_k,
            stop_token_ids=tuple(args.rollout_stop_token_ids),
            sampling_seed=sampling_seed(
                rollout_seed=args.rollout_seed, rollout_id=rollout_id, sample_index=sample.index
            ),
        )
        if sampling.max_new_tokens > 0:
            async with gate:
                result = await _generate(sample, clients[sample.group_index % len(clients)], sampling)
            _fill(sample, result)
        else:
            sample.status = SampleStatus.TRUNCATED

    try:
        async with asyncio.TaskGroup() as group:
            for sample in samples:
                group.create_task(run(sample))
    except ExceptionGroup as errors:
        # The first failure cancelled the others; it is the one to tell.
        raise errors.exceptions[0] from None


async def _generate(sample: Sample, client: Engine, sampling: SamplingParams) -> GenerateResult:
    try:
        return await client.generate(sample.tokens, sampling)
    except EngineRefused as error:
        if error.status == 400:
            raise ValueError(f"sample {sample.index}: {error}") from None
        raise
    except ValueError as error:
        raise ValueError(f"sample {sample.index}: {error}") from None


def _fill(sample: Sample, result: GenerateResult) -> None:
    sample.append_response_tokens(result.output_ids, log_probs=result.log_probs)
    sample.status = _STATUS[result.finish_reason]
    for span in result.weight_versions:
        if span.version not in sample.weight_versions:
            sample.weight_versions.append(span.version)
