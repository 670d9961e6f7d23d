"""Asynchronous client of one SGLang server: token ids in, typed results out, and no request that waits for ever."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp


class EngineError(RuntimeError):
    """An engine could not do what it was asked; the message names it, the request and the server's own words."""


class EngineUnreachable(EngineError):
    """Nobody answers at the engine's address, or the connection broke: the engine is gone."""


class EngineTimeout(EngineError):
    """The engine holds the connection and does not answer."""


class EngineRefused(EngineError):
    """The engine answered with an error."""

    def __init__(self, message: str, *, status: int, reason: str):
        super().__init__(message)
        self.status = status
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample one response. `ignore_eos` ignores `stop_token_ids` as well.

    A `sampling_seed` fixes the tokens for given prompt and weights, with one exception: SGLang samples a whole batch
    by one of two methods, and a request that filters (top_p, top_k, temperature 0) makes it take the other one for
    all requests that run beside it. So requests that run together should agree in all but their seeds.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    sampling_seed: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The `sampling_params` object of SGLang's /generate."""
        params: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": False,
        }
        if self.stop_token_ids:
            params["stop_token_ids"] = list(self.stop_token_ids)
        if self.sampling_seed is not None:
            params["sampling_seed"] = self.sampling_seed
        return params


@dataclass(frozen=True)
class WeightVersionSpan:
    """Output tokens start..end (end exclusive) were sampled by the weights called `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class GenerateResult:
    """One response.

    `log_probs[i]` is the log-probability of `output_ids[i]` under the engine's distribution at the request's
    temperature, before top-p and top-k. `finish_reason` is "stop" (a stop token, which is in `output_ids`), "length"
    or "abort".
    """

    output_ids: list[int]
    log_probs: list[float]
    finish_reason: Literal["stop", "length", "abort"]
    weight_versions: list[WeightVersionSpan]


@dataclass(frozen=True)
class RankChecksums:
    """Checksums of one tensor-parallel rank's parameters, by the engine's own (fused) names."""

    tp_rank: int
    tp_size: int
    checksums: dict[str, str]


def _parse_result(answer: Mapping[str, Any], *, where: str) -> GenerateResult:
    meta = answer["meta_info"]
    output_ids = answer["output_ids"]
    pairs = meta.get("output_token_logprobs") or []
    if len(pairs) != len(output_ids) or any(pair[1] != token for pair, token in zip(pairs, output_ids, strict=False)):
        raise EngineError(f"{where}: {len(output_ids)} output tokens came with log-probs of {len(pairs)} other ones")
    return GenerateResult(
        output_ids=list(output_ids),
        log_probs=[float(pair[0]) for pair in pairs],
        finish_reason=meta["finish_reason"]["type"],
        weight_versions=[WeightVersionSpan(s["version"], s["start"], s["end"]) for s in meta["weight_versions"]],
    )


class SGLangClient:
    """Client of the server at `url`; use it within one event loop at a time, and `await close()` it.

    Args:
        timeout_s: a request that takes longer raises EngineTimeout.
        vocab_size: token ids beyond it are refused here; they would kill the server's scheduler.
    """

    def __init__(self, url: str, *, timeout_s: float = 600.0, vocab_size: int | None = None):
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self.vocab_size = vocab_size
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> "SGLangClient":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; a later request opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _open_session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._session is not None and self._loop is not loop:
            # Its loop is gone, and with it every means to close the connections in order.
            self._session.detach()
        if self._session is None or self._session.closed:
            # limit=0: how many requests run at once is the caller's decision. force_close: the server ends idle
            # connections after seconds, and a request written into one that is just ending would be lost.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
            self._loop = loop
        return self._session

    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> str:
        limit = self.timeout_s if timeout_s is None else timeout_s
        where = f"SGLang engine {self.url}, {method} {path}"
        try:
            async with self._open_session().request(
                method, self.url + path, json=body, timeout=aiohttp.ClientTimeout(total=limit)
            ) as response:
                text = await response.text()
                if response.status != 200:
                    reason = _error_message(text)
                    raise EngineRefused(
                        f"{where}: HTTP {response.status}: {reason}", status=response.status, reason=reason
                    )
                return text
        except TimeoutError:
            raise EngineTimeout(f"{where}: no answer within {limit:g} s; the engine is alive but stuck") from None
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError) as error:
            detail = str(error) or type(error).__name__
            raise EngineUnreachable(f"{where}: the engine is gone or was never there ({detail})") from None

    async def _post(self, path: str, body: Mapping[str, Any], *, timeout_s: float | None = None) -> dict[str, Any]:

        return json.loads(await self._request("POST", path, body, timeout_s=timeout_s))

    def _check_ids(self, input_ids: Sequence[int]) -> None:
        if not input_ids:
            raise ValueError("a prompt has no tokens: the engine needs at least one")
        if self.vocab_size is not None and not 0 <= min(input_ids) <= max(input_ids) < self.vocab_size:
            worst = next(token for token in input_ids if not 0 <= token < self.vocab_size)
            raise ValueError(f"token id {worst} is outside the engine's vocabulary of {self.vocab_size}")

    async def generate(self, input_ids: Sequence[int], sampling: SamplingParams) -> GenerateResult:
        """Sample one response.

        Raises:
            ValueError: a token id is outside the vocabulary.
            EngineError: see its subclasses.
        """
        self._check_ids(input_ids)
        body = {
            "input_ids": list(input_ids),
            "sampling_params": sampling.to_json(),
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        answer = await self._post("/generate", body)
        return _parse_result(answer, where=f"SGLang engine {self.url}, /generate")

    async def check_health(self, *, timeout_s: float = 20.0) -> None:
        """Have the scheduler show a sign of life: EngineTimeout or EngineUnreachable if it gives none."""
        await self._request("GET", "/health_generate", timeout_s=timeout_s)

    async def weight_version(self) -> str:
        """Version of the weights that the engine serves now; "default" before the first update."""

        return json.loads(await self._request("GET", "/model_info"))["weight_version"]

    async def flush_cache(self, *, timeout_s: float = 30.0) -> None:
        """Empty the prefix cache; waits up to `timeout_s` for running requests to end, then EngineRefused."""
        # Asked to wait itself, the server would wait in vain for requests that `pause("retract")` has put back.
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            try:
                await self._request("POST", "/flush_cache")
                return
            except EngineRefused as error:
                if error.status != 400 or asyncio.get_running_loop().time() >= deadline:
                    raise
            await asyncio.sleep(0.05)

    async def pause(self, mode: Literal["abort", "retract", "in_place"] = "retract") -> None:
        """Stop sampling: end the running requests, or put them back ("retract"), or freeze them ("in_place")."""
        await self._request("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._request("POST", "/continue_generation", {})

    async def init_weights_update_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        timeout_s: float | None = None,
    ) -> None:
        """Join the trainer's weight group; the engine's tensor-parallel rank r becomes rank `rank_offset + r`.

        Returns once all `world_size` ranks are there: run it beside `join_weight_group`.
        """
        body = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        await self._post("/init_weights_update_group", body, timeout_s=timeout_s)

    async def destroy_weights_update_group(self, *, group_name: str) -> None:
        """Leave the weight group."""
        await self._post("/destroy_weights_update_group", {"group_name": group_name})

    async def begin_weight_update(self) -> None:
        """Open an update; EngineRefused where one is open already."""
        try:
            await self._post("/begin_weight_update", {})
        except EngineRefused as error:
            if error.status == 404:
                raise EngineError(f"SGLang engine {self.url} knows no /begin_weight_update: it is too old") from None
            raise

    async def update_weights_from_distributed(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        flattened: bool = True,
        weight_version: str | None = None,
        flush_cache: bool = False,
    ) -> None:
        """Receive the tensors that rank 0 of the group broadcasts, and load them; run it beside that broadcast.

        `flattened` awaits one broadcast of all bytes (`broadcast_bucket`), else one for each tensor in order.
        """
        body: dict[str, Any] = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "flush_cache": flush_cache,
        }
        if flattened:
            body["load_format"] = "flattened_bucket"
        if weight_version is not None:
            body["weight_version"] = weight_version
        await self._post("/update_weights_from_distributed", body)

    async def end_weight_update(self) -> None:
        """Close the update; EngineRefused where none is open."""
        await self._post("/end_weight_update", {})

    async def checksums(self, *, timeout_s: float | None = None) -> list[RankChecksums]:
        """Checksums of all parameters, one entry for each tensor-parallel rank.

        `miles.backends.weight_checksums.engine_checksums` computes the same from Hugging Face tensors.
        """
        ranks = (await self._post("/weights_checker", {"action": "checksum"}, timeout_s=timeout_s))["ranks"]
        parsed = []
        for rank in ranks:
            place = rank["parallelism_info"][0]
            parsed.append(RankChecksums(place["tp_rank"], place["tp_size"], dict(rank["checksums"])))
        return sorted(parsed, key=lambda rank: rank.tp_rank)


def _error_message(text: str) -> str:
    """The server's own message out of an error body, on one line."""

    try:
        content = json.loads(text)
    except ValueError:
        content = text
    if isinstance(content, dict):
        error = content.get("error", content)
        content = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(content).split())[:500]
