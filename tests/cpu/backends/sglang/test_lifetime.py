"""Servers that end: by their parent's death, by their own, or before they began. Two more real servers run here."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
from transformers import AutoModelForCausalLM

from miles.backends.sglang.client import EngineUnreachable, SamplingParams, SGLangClient
from miles.backends.sglang.ports import reserve_port
from miles.backends.sglang.server import EngineStartError, SGLangServer
from miles.backends.weight_checksums import differing_names, engine_checksums

SETTINGS = SamplingParams(max_new_tokens=16, sampling_seed=1, ignore_eos=True)
PROMPT = [1, 22, 4, 15]


def wait_for(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())


def tied_names(model):
    """Hugging Face tensors without the output layer that shares the embedding's."""
    return [(name, tensor) for name, tensor in model.state_dict().items() if name != "lm_head.weight"]


async def assert_serves(client, folder, reference_log_probs):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    result = await client.generate(PROMPT, SETTINGS)
    assert result.log_probs == pytest.approx(reference_log_probs(model, PROMPT, result.output_ids), abs=1e-5)
    (rank,) = await client.checksums()
    assert differing_names(engine_checksums(tied_names(model), tied=True), rank.checksums) == []


async def test_tied_qwen3_is_served_and_sigkill_of_the_parent_leaves_no_process(
    make_tiny_model, tmp_path, processes_of, reference_log_probs
):
    folder = make_tiny_model("Qwen3", tie_word_embeddings=True, head_dim=16)
    program = textwrap.dedent(f"""
        import time
        from miles.backends.sglang.server import SGLangServer
        server = SGLangServer({str(folder)!r}, device="cpu", log_path={str(tmp_path / "server.log")!r})
        server.start()
        print(server.port, server._process.pid, flush=True)
        time.sleep(600)
    """)
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        line = await asyncio.to_thread(parent.stdout.readline)
        assert line, (tmp_path / "server.log").read_text()[-2000:]
        port, supervisor = map(int, line.split())
        async with SGLangClient(f"http://127.0.0.1:{port}", timeout_s=60.0) as client:
            await assert_serves(client, folder, reference_log_probs)
        tree = [psutil.Process(supervisor), *processes_of(supervisor)]
        assert len(tree) >= 5
        scratch = tree[0].cmdline()[5]
        assert os.path.isdir(scratch)
        # Its own alone: another server may run beside this test.
        maps = [found.path for process in tree for found in process.memory_maps()]
        shared_memory = {path for path in maps if path.startswith("/dev/shm/sglang") and os.path.exists(path)}
        assert shared_memory
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert wait_for(lambda: not any(process.is_running() for process in tree), 15.0), tree
    assert not os.path.exists(scratch)
    assert not [path for path in shared_memory if os.path.exists(path)]
    # The port is free again at once.
    reserve_port(port).release()


async def test_tied_qwen2_is_served_and_a_killed_scheduler_is_told_in_one_line(
    make_tiny_model, tmp_path, processes_of, reference_log_probs
):
    folder = make_tiny_model("Qwen2", tie_word_embeddings=True)
    server = SGLangServer(folder, device="cpu", log_path=tmp_path / "server.log", request_timeout_s=60.0)
    await asyncio.to_thread(server.start)
    try:
        with pytest.raises(ValueError, match=f"port {server.port} on 127.0.0.1 cannot be used"):
            SGLangServer(folder, device="cpu", port=server.port)
        async with server.client() as client:
            await assert_serves(client, folder, reference_log_probs)
            tree = processes_of(server._process.pid)
            scheduler = next(p for p in tree if "scheduler" in " ".join(p.cmdline()))
            # Halted, so that no machine is fast enough to answer before the kill.
            scheduler.suspend()
            running = [asyncio.create_task(client.generate(PROMPT, SETTINGS)) for _ in range(4)]
            done, _ = await asyncio.wait(running, timeout=0.5)
            assert not done
            scheduler.kill()
            began = time.monotonic()
            for outcome in await asyncio.gather(*running, return_exceptions=True):
                assert isinstance(outcome, EngineUnreachable), outcome
                assert "\n" not in str(outcome) and server.url in str(outcome)
            assert time.monotonic() - began < 30
            assert wait_for(lambda: not server.is_alive(), 20.0)
            assert not any(process.is_running() for process in tree)
            with pytest.raises(EngineUnreachable):
                await client.check_health()
    finally:
        server.stop()


def test_bad_flag_ends_the_start_with_the_servers_words_and_no_process(tiny_llama, tmp_path):
    server = SGLangServer(
        tiny_llama, device="cpu", log_path=tmp_path / "server.log", extra_args=["--no-such-flag-at-all"]
    )
    with pytest.raises(EngineStartError, match=r"did not start: .*--no-such-flag-at-all") as caught:
        server.start()
    assert "\n" not in caught.value.cause and str(tmp_path / "server.log") in str(caught.value).splitlines()[0]
    assert not server.is_alive()
    reserve_port(server.port).release()


def test_server_that_is_not_ready_in_time_is_ended(tiny_llama, tmp_path, processes_of):
    # Its own processes alone, as they are when the server is given up: others may start beside this test.
    tree = []

    class Watched(SGLangServer):
        def stop(self):
            if self._process is not None:
                tree.extend([psutil.Process(self._process.pid), *processes_of(self._process.pid)])
            super().stop()

    server = Watched(tiny_llama, device="cpu", log_path=tmp_path / "server.log", start_timeout_s=1.0)
    with pytest.raises(EngineStartError, match=r"not ready within 1 s: it never answered /ready"):
        server.start()
    assert len(tree) >= 3, "two supervisors and the server"
    assert not any(process.is_running() for process in tree)


def test_missing_model_folder_is_told_before_anything_starts(tmp_path):
    with pytest.raises(ValueError, match=r"model folder .*/nowhere does not exist"):
        SGLangServer(tmp_path / "nowhere", device="cpu")
