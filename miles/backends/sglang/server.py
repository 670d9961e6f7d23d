"""One SGLang server: the real `sglang.launch_server`, under a supervisor that leaves no orphan."""

import contextlib
import http.client
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import psutil

from miles.backends.sglang.client import SGLangClient
from miles.backends.sglang.ports import ReservedPort, reserve_port
from miles.config.hf_folder import inspect_hf_folder

_STAND_INS = Path(__file__).parent / "cpu_stand_ins"
_SUPERVISOR = Path(__file__).parent / "supervisor.py"
_TAIL_LINES = 25

# Log patterns and what they mean for the user, most specific first. {port} and {model} are filled in.
_CAUSES = (
    (r"address already in use|Port .* (already|is) in use", "port {port} is in use by another process"),
    (r"No space left on device", "no room left on the disk (or in /dev/shm)"),
    (r"Bus error|SIGBUS", "no room left in /dev/shm"),
    (r"CUDA out of memory|torch\.OutOfMemoryError|Not enough memory", "not enough memory on the device for {model}"),
    (r"MemoryError|Cannot allocate memory|can't allocate memory", "not enough memory in this machine for {model}"),
    (r"error: unrecognized arguments: .*", None),
    (r"SafetensorError.*|.*is not the path to a directory containing.*", None),
)


class EngineStartError(RuntimeError):
    """A server that did not come up. The first line says why; the log's tail follows.

    `cause` is that reason alone, `log_path` the whole log.
    """

    def __init__(self, message: str, *, cause: str, log_path: Path):
        super().__init__(message)
        self.cause = cause
        self.log_path = log_path


def cpu_environment(tp_size: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that make the published SGLang run on a CPU; for the server's processes only."""
    path = [str(_STAND_INS), *filter(None, [inherited.get("PYTHONPATH")])]
    environment = {
        "PYTHONPATH": os.pathsep.join(path),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "served_models",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        # The compiler would look for Triton, find the stand-in, and change log-probs in the last bits.
        "TORCHDYNAMO_DISABLE": "1",
        # A crashed scheduler otherwise waits a minute for CUDA core dumps before the server ends.
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    }
    if tp_size > 1:
        cores = sorted(os.sched_getaffinity(0))
        ranks = [cores[rank::tp_size] or [cores[rank % len(cores)]] for rank in range(tp_size)]
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, rank)) for rank in ranks)
    return environment


class SGLangServer:
    """A server for one model, in processes of its own.

    Args:
        model_path: Hugging Face folder.
        device: "cpu" (stand-ins, fp32, seeded sampling) or "cuda" (SGLang as published, its own defaults).
        port: HTTP port; None lets us choose. The port is held from construction on.
        tp_size: tensor-parallel ranks.
        dtype: SGLang's `--dtype`; None is float32 on a CPU and SGLang's choice on a GPU.
        max_total_tokens: tokens of the key-value cache; None is SGLang's choice.
        extra_args: further arguments of SGLang's command line; a later one wins.
        start_timeout_s: time until ready.
        request_timeout_s: given to `client()`.
        log_path: file of the server's output, appended to; None makes one in the temporary folder.
        env: further environment variables for the server.

    Raises:
        ValueError: the model folder is missing, truncated or has no fitting tokenizer; the port is taken.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        device: Literal["cpu", "cuda"],
        port: int | None = None,
        host: str = "127.0.0.1",
        tp_size: int = 1,
        dtype: str | None = None,
        max_total_tokens: int | None = 32768,
        random_seed: int = 42,
        extra_args: Sequence[str] = (),
        start_timeout_s: float = 300.0,
        request_timeout_s: float = 600.0,
        log_path: str | Path | None = None,
        env: Mapping[str, str] | None = None,
    ):
        if device not in ("cpu", "cuda"):
            raise ValueError(f"device of an SGLang server must be 'cpu' or 'cuda', got {device!r}")
        self.model_path = Path(model_path).resolve()
        self.vocab_size = inspect_hf_folder(self.model_path).config["vocab_size"]
        if importlib.util.find_spec("sglang") is None:
            raise ValueError("sglang is not installed in this environment: install the extra `cpu` or `gpu`")
        self.device = device
        self.host = host
        self.tp_size = tp_size
        self.dtype = dtype or ("float32" if device == "cpu" else "auto")
        self.max_total_tokens = max_total_tokens
        self.random_seed = random_seed
        self.extra_args = list(extra_args)
        self.start_timeout_s = start_timeout_s
        self.request_timeout_s = request_timeout_s
        self.env = dict(env or {})
        self._http_port = reserve_port(port, host=host)
        self.port = self._http_port.port
        self._rendezvous_port: ReservedPort | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._log_offset = 0
        if log_path is None:
            log_path = Path(tempfile.gettempdir()) / f"miles-sglang-{os.getpid()}-{self.port}.log"
        self.log_path = Path(log_path)

    @classmethod
    def from_args(
        cls, args: Any, *, engine: int = 0, device: Literal["cpu", "cuda"], **overrides: Any
    ) -> "SGLangServer":
        """The server that `args` (see `miles.config.Args`) asks for as engine number `engine` of this machine."""
        settings: dict[str, Any] = {
            "port": None if args.sglang_port_base is None else args.sglang_port_base + engine,
            "tp_size": args.rollout_num_gpus_per_engine,
            "dtype": args.engine_dtype(device),
            "max_total_tokens": args.engine_cache_tokens(device),
            "random_seed": args.rollout_seed,
            "extra_args": args.sglang_extra_args,
            "start_timeout_s": args.sglang_server_timeout_s,
            "request_timeout_s": args.sglang_request_timeout_s,
        }
        if args.run_dir is not None:
            settings["log_path"] = Path(args.run_dir) / "logs" / f"sglang_engine_{engine}.log"
        return cls(args.hf_checkpoint, device=device, **{**settings, **overrides})

    @property
    def url(self) -> str:
        """Base URL of the server's HTTP interface."""
        return f"http://{self.host}:{self.port}"

    def client(self) -> SGLangClient:
        """A client that knows this server's time limit and vocabulary."""
        return SGLangClient(self.url, timeout_s=self.request_timeout_s, vocab_size=self.vocab_size)

    def command(self) -> list[str]:
        """The server's command line."""
        assert self._rendezvous_port is not None
        # -P: a folder named like a package in the working directory must not be imported in its place.
        command = [sys.executable, "-P", "-m", "sglang.launch_server"]
        command += ["--model-path", str(self.model_path), "--host", self.host, "--port", str(self.port)]
        command += ["--nccl-port", str(self._rendezvous_port.port), "--tp-size", str(self.tp_size)]
        command += ["--dtype", self.dtype, "--random-seed", str(self.random_seed), "--skip-server-warmup"]
        if self.max_total_tokens is not None:
            command += ["--max-total-tokens", str(self.max_total_tokens)]
        if self.device == "cpu":
            command += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
            command += ["--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled"]
            command += ["--enable-deterministic-inference", "--sleep-on-idle"]
        return command + self.extra_args

    def start(self) -> None:
        """Launch the server and wait until it has answered a request.

        Raises:
            EngineStartError: it ended or was not ready in time; nothing is left running.
        """
        assert self._process is None, "start() was called twice"
        began = time.monotonic()
        self._rendezvous_port = reserve_port(host=self.host, avoid=[self.port])
        try:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            self.log_path.open("ab").close()
            scratch = tempfile.mkdtemp(prefix="miles-sglang-")
        except OSError as error:
            self.stop()
            raise self._start_error(f"{error.strerror}: {error.filename}") from None
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TMPDIR": scratch}
        if self.device == "cpu":
            environment.update(cpu_environment(self.tp_size, os.environ))
        environment.update(self.env)
        supervisor = [sys.executable, "-I", "-S", str(_SUPERVISOR), str(os.getpid()), scratch]
        try:
            with self.log_path.open("ab") as log:
                self._log_offset = log.tell()
                self._process = subprocess.Popen(
                    [*supervisor, *self.command()],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
            self._wait_until_ready(began + self.start_timeout_s)
        except BaseException:
            self.stop()
            raise
        # Both ports have listeners now, which hold them better than we do.
        self._http_port.release()
        self._rendezvous_port.release()

    def _wait_until_ready(self, deadline: float) -> None:
        ready = False
        while time.monotonic() < deadline:
            assert self._process is not None
            code = self._process.poll()
            if code is not None:
                raise self._start_error(self._cause(code))
            # The first request proves that the scheduler behind the HTTP front works.
            remaining = max(deadline - time.monotonic(), 0.1)
            if ready and self._ask("POST", "/generate", min(remaining, 60.0)):
                # Each weight update collects garbage: most of a second if all that was imported is looked at too.
                # SGLang asks this of itself at its start, often before anybody listens.
                self._ask("GET", "/freeze_gc", min(remaining, 60.0))
                return
            ready = ready or self._ask("GET", "/ready", min(remaining, 5.0))
            if not ready:
                time.sleep(0.2)
        what = "it answers /ready but no request" if ready else "it never answered /ready"
        raise self._start_error(f"not ready within {self.start_timeout_s:g} s: {what}")

    def _ask(self, method: str, path: str, timeout_s: float) -> bool:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        body = None
        if method == "POST":
            body = json.dumps({"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}})
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def log_tail(self, lines: int = _TAIL_LINES) -> str:
        """Last lines that this server wrote."""
        try:
            with self.log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_offset, size - 200_000))
                return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])
        except OSError as error:
            return f"(log cannot be read: {error})"

    def _cause(self, code: int) -> str:
        log = self.log_tail(2000)
        for pattern, meaning in _CAUSES:
            if found := re.search(pattern, log, re.IGNORECASE):
                return (meaning or found.group(0)).format(port=self.port, model=self.model_path)
        errors = re.findall(r"^(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt)\b.*$", log, re.MULTILINE)
        if errors:
            return errors[-1][:300]
        if code == 128 + 9:
            return "killed by SIGKILL, which the kernel sends when the machine is out of memory"
        return f"ended with exit status {code} and no error in its log"

    def _start_error(self, cause: str) -> EngineStartError:
        message = f"SGLang server on port {self.port} did not start: {cause} (log: {self.log_path})"
        return EngineStartError(f"{message}\n{self.log_tail()}", cause=cause, log_path=self.log_path)

    def is_alive(self) -> bool:
        """Whether the server's process runs; whether it answers is `SGLangClient.check_health`'s question."""
        return self._process is not None and self._process.poll() is None

    def signal(self, signum: int) -> None:
        """Send a signal to every process of the server, but to none that watches over it."""
        assert self._process is not None, "start() comes first"
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if str(_SUPERVISOR) not in process.cmdline():
                    process.send_signal(signum)

    def stop(self) -> None:
        """End every process of the server and free its ports; may be called twice."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(timeout=20.0)
            except subprocess.TimeoutExpired:
                # The kernel then kills the server, whose processes follow their parent.
                process.kill()
                process.wait()
        self._http_port.release()
        if self._rendezvous_port is not None:
            self._rendezvous_port.release()

    def __enter__(self) -> "SGLangServer":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
