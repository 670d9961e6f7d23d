"""Weights from a trainer to a live engine through a process group, as in training."""

import asyncio
import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from miles.backends.sglang.client import EngineRefused, SamplingParams
from miles.backends.sglang.ports import reserve_port
from miles.backends.weight_checksums import differing_names, engine_checksums
from miles.backends.weight_group import broadcast_bucket, dtype_name, join_weight_group, leave_weight_group

GROUP = "test_weights"
PROMPT = [1, 22, 4, 15]
SETTINGS = SamplingParams(max_new_tokens=24, sampling_seed=5, ignore_eos=True)


class Trainer:
    """Rank 0 of the group, in a thread of its own, as an actor process is."""

    def __init__(self, client):
        self.client = client
        self.thread = ThreadPoolExecutor(1)
        self.group = None

    async def beside(self, function, *arguments):
        return await asyncio.get_running_loop().run_in_executor(self.thread, function, *arguments)

    async def connect(self):
        with reserve_port() as port:
            self.group, _ = await asyncio.gather(
                self.beside(join_weight_group, f"tcp://127.0.0.1:{port.port}", 2, 0, GROUP, "gloo", 60.0),
                self.client.init_weights_update_group(
                    master_address="127.0.0.1",
                    master_port=port.port,
                    rank_offset=1,
                    world_size=2,
                    group_name=GROUP,
                    backend="gloo",
                ),
            )

    async def send(self, weights, version, *, bucket_size=5):
        named = list(weights.items())
        assert len(named) > 2 * bucket_size
        await self.client.begin_weight_update()
        for start in range(0, len(named), bucket_size):
            names, tensors = zip(*named[start : start + bucket_size], strict=True)
            await asyncio.gather(
                self.beside(broadcast_bucket, self.group, tensors),
                self.client.update_weights_from_distributed(
                    names=names,
                    dtypes=[dtype_name(tensor.dtype) for tensor in tensors],
                    shapes=[tensor.shape for tensor in tensors],
                    group_name=GROUP,
                    weight_version=version,
                ),
            )
        await self.client.end_weight_update()

    async def disconnect(self):
        await self.client.destroy_weights_update_group(group_name=GROUP)
        await self.beside(leave_weight_group, self.group)
        self.thread.shutdown()


@pytest.fixture
async def client(sglang_server):
    async with sglang_server.client() as client:
        yield client


@pytest.fixture
async def trainer(client, llama):
    """A connected trainer; the server has its own weights and version back afterwards."""
    original = copy.deepcopy(llama.state_dict())
    trainer = Trainer(client)
    await trainer.connect()
    yield trainer
    await trainer.send(original, "default")
    await client.flush_cache()
    await trainer.disconnect()


def trained(model, seed):
    changed = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return changed


async def checksums(client):
    (rank,) = await client.checksums()
    return rank.checksums


async def test_update_makes_the_engine_the_trainers_model(client, trainer, llama, reference_log_probs):
    before = await client.generate(PROMPT, SETTINGS)
    assert before.weight_versions[0].version == "default"
    assert differing_names(engine_checksums(llama.state_dict().items()), await checksums(client)) == []
    for version in ("1", "2"):
        model = trained(llama, seed=int(version))
        await trainer.send(model.state_dict(), version)
        await client.flush_cache()
        assert await client.weight_version() == version
        assert differing_names(engine_checksums(model.state_dict().items()), await checksums(client)) == []
        after = await client.generate(PROMPT, SETTINGS)
        expected = reference_log_probs(model, PROMPT, after.output_ids)
        assert after.log_probs == pytest.approx(expected, abs=1e-5)
        # The old weights would have given clearly other numbers.
        stale = reference_log_probs(llama, PROMPT, after.output_ids)
        assert max(abs(a - b) for a, b in zip(after.log_probs, stale, strict=True)) > 1e-2
        assert {span.version for span in after.weight_versions} == {version}


async def test_checksums_name_the_one_parameter_that_differs(client, llama):
    weights = copy.deepcopy(llama.state_dict())
    weights["model.layers.1.self_attn.k_proj.weight"].view(torch.int32)[0, 0] ^= 1
    different = differing_names(engine_checksums(weights.items()), await checksums(client))
    assert different == ["model.layers.1.self_attn.qkv_proj.weight"]


async def test_update_in_mid_generation_leaves_spans_that_say_which_weights_sampled(
    client, trainer, llama, reference_log_probs
):
    model = trained(llama, seed=9)
    settings = [SamplingParams(max_new_tokens=100, sampling_seed=n, ignore_eos=True) for n in range(24)]
    # SGLang's own brake: the fastest machine takes 5 s.
    await client._request("POST", "/slow_down", {"forward_sleep_time": 0.05})
    running = [asyncio.create_task(client.generate(PROMPT, setting)) for setting in settings]
    await asyncio.sleep(1.0)
    await client.pause("retract")
    await client._request("POST", "/slow_down", {"forward_sleep_time": None})
    await trainer.send(model.state_dict(), "9")
    await client.flush_cache()
    await client.resume()
    for result in (await asyncio.gather(*running))[::6]:
        assert [span.version for span in result.weight_versions] == ["default", "9"]
        assert result.weight_versions[0].start == 0 and result.weight_versions[-1].end == 100
        cut = result.weight_versions[0].end
        assert 0 < cut == result.weight_versions[1].start
        old = reference_log_probs(llama, PROMPT, result.output_ids)
        new = reference_log_probs(model, PROMPT, result.output_ids)
        assert result.log_probs == pytest.approx(old[:cut] + new[cut:], abs=1e-5)


async def test_load_outside_a_session_is_refused_with_the_servers_words(client):
    with pytest.raises(EngineRefused, match=r"HTTP 400: .*begin_weight_update"):
        await client.end_weight_update()
    with pytest.raises(EngineRefused, match="between begin_weight_update"):
        await client.update_weights_from_distributed(
            names=["model.norm.weight"], dtypes=["float32"], shapes=[[64]], group_name=GROUP
        )
