"""What a user reads when a server does not come up."""

import pytest

from miles.backends.sglang.server import EngineStartError, SGLangServer, cpu_environment


@pytest.fixture
def server(monkeypatch, tmp_path):
    from miles.backends.sglang import server as module
    from miles.config.hf_folder import HfFolder

    found = HfFolder(path=tmp_path / "model", config={"vocab_size": 128}, num_parameters=0)
    monkeypatch.setattr(module, "inspect_hf_folder", lambda folder: found)
    server = SGLangServer(tmp_path / "model", device="cpu", log_path=tmp_path / "server.log")
    yield server
    server.stop()


@pytest.mark.parametrize(
    ("log", "status", "cause"),
    [
        ("ERROR: [Errno 98] error while attempting to bind: address already in use", 1, "port {port} is in use"),
        ("OSError: [Errno 28] No space left on device: '/tmp/x'", 1, "no room left on the disk"),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried", 1, "not enough memory"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", 1, "not enough memory on the device"),
        (
            "launch_server.py: error: unrecognized arguments: --no-such-flag",
            2,
            "unrecognized arguments: --no-such-flag",
        ),
        ("Traceback\n  File x\nValueError: head size 3 is not supported\n[2026] noise", 1, "ValueError: head size 3"),
        ("just noise", 137, "killed by SIGKILL"),
        ("just noise", 5, "ended with exit status 5"),
    ],
)
def test_cause_is_read_from_the_log(server, log, status, cause):
    server.log_path.write_text(log + "\n")
    assert cause.format(port=server.port) in server._cause(status)
    error = server._start_error(server._cause(status))
    assert error.cause in str(error).splitlines()[0] and str(server.log_path) in str(error).splitlines()[0]
    assert log.splitlines()[-1] in str(error)


def test_log_of_an_earlier_server_in_the_same_file_is_not_blamed(server):
    server.log_path.write_text("OSError: [Errno 28] No space left on device\n")
    server._log_offset = server.log_path.stat().st_size
    assert "exit status 1" in server._cause(1)


def test_port_in_use_is_refused_before_anything_starts(server):
    with pytest.raises(ValueError, match=f"port {server.port} on 127.0.0.1 cannot be used"):
        SGLangServer(server.model_path, device="cpu", port=server.port)


def test_unknown_device_is_refused(server):
    with pytest.raises(ValueError, match="'cpu' or 'cuda', got 'tpu'"):
        SGLangServer(server.model_path, device="tpu")  # pyright: ignore[reportArgumentType]


def test_cpu_environment_keeps_the_users_pythonpath_behind_the_stand_ins():
    path = cpu_environment(1, {"PYTHONPATH": "/mine"})["PYTHONPATH"].split(":")
    assert path[0].endswith("cpu_stand_ins") and path[1:] == ["/mine"]


def test_cpu_environment_gives_every_rank_cores():
    assert len(cpu_environment(2, {})["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 2
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in cpu_environment(1, {})


def test_log_that_cannot_be_written_ends_the_start_in_one_line(server, tmp_path):
    (tmp_path / "file").write_text("")
    server.log_path = tmp_path / "file" / "server.log"
    with pytest.raises(EngineStartError, match=r"did not start: File exists: .*file") as caught:
        server.start()
    assert "\n" not in caught.value.cause
