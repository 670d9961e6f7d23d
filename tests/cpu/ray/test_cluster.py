"""What is refused before Ray starts."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from miles.backends.sglang.ports import reserve_port
from miles.config import Args
from miles.ray import cluster
from miles.ray.cluster import check_before_ray_starts


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A port that somebody listens on; the two below it are free, and no connection of anybody's takes them."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    while True:
        with (
            contextlib.suppress(ValueError),
            reserve_port() as top,
            reserve_port(top.port - 1),
            reserve_port(top.port - 2),
        ):
            break
    with socket.create_server(("127.0.0.1", top.port)):
        yield top.port


def settings(model: Path, port: int, **more: Any) -> Args:
    fields: dict[str, Any] = {"hf_checkpoint": str(model), "device": "cpu", "rollout_num_gpus": 2}
    return Args.build(**fields, sglang_port_base=port - 1, **more)


def test_port_of_an_engine_that_is_taken_is_refused_by_flag(tiny_hf_model: Path, taken: int) -> None:
    with pytest.raises(
        ValueError, match=rf"^--sglang-port-base {taken - 1}: port {taken} on 127.0.0.1 cannot be used"
    ):
        check_before_ray_starts(settings(tiny_hf_model, taken), entry="train")


def test_port_that_no_engine_of_this_machine_takes_is_not_looked_at(
    tiny_hf_model: Path, taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_before_ray_starts(settings(tiny_hf_model, taken), entry="train_value")
    check_before_ray_starts(settings(tiny_hf_model, taken, load_rollouts=str(tmp_path)), entry="train")
    check_before_ray_starts(settings(tiny_hf_model, taken - 1), entry="train")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    check_before_ray_starts(settings(tiny_hf_model, taken), entry="train")


@pytest.mark.parametrize("field", ["hf_checkpoint", "ref_load"])
def test_model_folder_whose_weights_do_not_fit_is_refused_by_flag(
    make_hf_model: Any, tiny_hf_model: Path, field: str
) -> None:
    other = make_hf_model(num_hidden_layers=1)
    config = other / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 1', '"num_hidden_layers": 2'))
    args = Args.build(**{"hf_checkpoint": str(tiny_hf_model), "device": "cpu", field: str(other)})
    flag = f"--{field.replace('_', '-')}"
    with pytest.raises(ValueError, match=f"^{flag}: {config}: num_hidden_layers is 2, the weight files hold 1 layers"):
        check_before_ray_starts(args, entry="train")


@pytest.mark.parametrize(
    "address", ["127.0.0.1", " ", "127.0.0.1:abc", ":6379", "http://127.0.0.1:8265", "ray://127.0.0.1:10001", "local"]
)
def test_ray_address_that_is_none_is_refused_by_name(
    tiny_hf_model: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    args = Args.build(hf_checkpoint=str(tiny_hf_model), device="cpu")
    with pytest.raises(ValueError, match=f"^RAY_ADDRESS '{address}': expected HOST:PORT"):
        check_before_ray_starts(args, entry="train")


def test_ray_address_with_a_port_that_cannot_be_is_one_line(
    tiny_hf_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:99999")
    args = Args.build(hf_checkpoint=str(tiny_hf_model), device="cpu")
    with pytest.raises(ValueError, match=r"^RAY_ADDRESS 127.0.0.1:99999: no Ray cluster answers there"):
        check_before_ray_starts(args, entry="train")


def test_ray_address_where_something_else_listens_is_given_up(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_CLUSTER_ANSWER_S", 1.0)
    with pytest.raises(ConnectionError, match=f"^RAY_ADDRESS 127.0.0.1:{taken}: what listens there did not answer"):
        cluster._meet(f"127.0.0.1:{taken}")
