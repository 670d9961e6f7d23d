"""Checkpoints resume to the same bits, reshard, survive kills, and refuse what is damaged or belongs to another
model.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

ACTOR = {"lr": 1e-2, "lr_decay_style": "linear", "lr_decay_iters": 10}


def sft(ranks: Any, batch: dict[str, Any], settings: dict[str, Any], *, world_size: int = 1, **more: Any) -> list[Any]:
    return ranks("train", world_size=world_size, role="actor", objective="sft", batch=batch, settings=settings, **more)


def all_weights(results: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    return {name: array for result in results for name, array in result["weights"].items()}


def assert_equal_bits(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert set(found) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
BF16 = {"bf16": True}
SHARDED = {"use_distributed_optimizer": True}
ROLES: dict[str, tuple[str, dict[str, Any]]] = {
    "actor": ("sft", {"lr": 1e-2}),
    "critic": ("value", {"critic_lr": 1e-2, "value_loss_type": "classification", "value_num_bins": 11}),
}


def run_role(ranks: Any, role: str, **arguments: Any) -> list[Any]:
    """Train a role with its objective; `save` and `load` among the settings mean the role's own folders."""
    objective, own = ROLES[role]
    prefix = "critic_" if role == "critic" else ""
    settings = own | {
        f"{prefix}{name}" if name in ("save", "load") else name: value
        for name, value in arguments.pop("settings").items()
    }
    return ranks("train", role=role, objective=objective, settings=settings, **arguments)


@pytest.mark.parametrize(
    ("role", "layout", "world_size"),
    [
        pytest.param("actor", {}, 1, id="actor_tp1"),
        pytest.param("actor", TP2, 2, id="actor_tp2"),
        pytest.param("actor", PP2, 2, id="actor_pp2_tied"),
        pytest.param("actor", SHARDED, 2, id="actor_dp2_distributed_optimizer"),
        pytest.param("critic", PP2, 2, id="critic_pp2"),
        pytest.param("critic", SHARDED | {"context_parallel_size": 2}, 2, id="critic_cp2_distributed_optimizer"),
        pytest.param("actor", TP2 | BF16, 2, id="actor_tp2_bf16"),
        # The value head is fp32 among bf16 parameters.
        pytest.param("critic", BF16, 1, id="critic_bf16"),
        pytest.param("critic", PP2 | BF16, 2, id="critic_pp2_bf16"),
        pytest.param("critic", SHARDED | BF16, 2, id="critic_dp2_distributed_optimizer_bf16"),
    ],
)
def test_resume_same_layout_equals_uninterrupted_run_bit_by_bit(
    role: str,
    layout: dict[str, Any],
    world_size: int,
    ranks: Any,
    model_folder: Callable[..., str],
    batch: dict[str, Any],
    tmp_path: Path,
) -> None:
    # faults.md row 42: with Adam's moments reset, steps 3 and 4 would differ
    base = {"hf_checkpoint": model_folder("llama", tied=True), "lr_decay_style": "linear", "lr_decay_iters": 10}
    settings = base | layout | {"save": str(tmp_path / "ckpt")}
    arguments: dict[str, Any] = {"world_size": world_size, "batch": batch}
    whole = run_role(ranks, role, settings=settings, steps=4, save_at=(2,), **arguments)
    assert (tmp_path / "ckpt" / "latest").read_text() == "iter_0000002\n"
    resumed = run_role(ranks, role, settings=settings | {"load": str(tmp_path / "ckpt")}, steps=2, **arguments)
    assert [r["start"] for r in resumed] == [2] * world_size
    assert_equal_bits(all_weights(resumed), all_weights(whole))
    for after, before in zip(resumed, whole, strict=True):
        assert after["metrics"] == before["metrics"][2:]


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a distributed checkpoint, whole."""
    reader = dcp.FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    tensors: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "distributed_optimizer"])
def test_moments_of_a_bfloat16_critic_lie_under_the_names_of_their_parameters(
    sharded: bool, ranks: Any, model_folder: Callable[..., str], batch: dict[str, Any], tmp_path: Path
) -> None:
    found = []
    for name in ("exact", "rounded"):
        settings: dict[str, Any] = {"hf_checkpoint": model_folder("llama", tied=True), "adam_eps": 1e-3}
        settings |= {"save": str(tmp_path / name)}
        settings |= {"bf16": True, "use_distributed_optimizer": sharded} if name == "rounded" else {}
        run_role(ranks, "critic", world_size=2, batch=batch, settings=settings, steps=2, save_at=(2,))
        tensors = saved_tensors(tmp_path / name / "iter_0000002")
        found.append({key: value for key, value in tensors.items() if ".exp_avg" in key})
    exact, rounded = found
    assert rounded.keys() == exact.keys()
    assert sum("output_layer" in key for key in exact) == 4
    for key, moment in exact.items():
        assert rounded[key].dtype == torch.float32
        # Of another parameter they would point anywhere; bfloat16 turns them by a few degrees.
        likeness = torch.nn.functional.cosine_similarity(rounded[key].flatten(), moment.flatten(), dim=0)
        assert likeness > 0.97, (key, likeness)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {}),
    "tp2": (2, TP2),
    "pp2": (2, PP2),
    "dp2": (2, {}),
    "cp2": (2, {"context_parallel_size": 2}),
    "dp2_tp2": (4, TP2),
}


@pytest.fixture(scope="module")
def uninterrupted(
    ranks: Any, model_folder: Callable[..., str], batch: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[dict[str, Any], list[Any]]]:
    """Settings and results of four steps on a layout, saved after the second; each run once."""
    cache: dict[tuple[str, str, bool], tuple[dict[str, Any], list[Any]]] = {}

    def get(role: str, layout: str, sharded: bool) -> tuple[dict[str, Any], list[Any]]:
        key = (role, layout, sharded)
        if key not in cache:
            world_size, sizes = LAYOUTS[layout]
            # With a larger epsilon no sign of a vanishing gradient decides over a whole learning rate.
            base = {"hf_checkpoint": model_folder("qwen2", tied=True), "adam_eps": 1e-3, "clip_grad": 0.5}
            base |= {"use_distributed_optimizer": sharded, "save": str(tmp_path_factory.mktemp("-".join(key[:2])))}
            results = run_role(
                ranks, role, world_size=world_size, batch=batch, settings=base | sizes, steps=4, save_at=(2,)
            )
            cache[key] = base, results
        return cache[key]

    return get


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "distributed_optimizer"])
@pytest.mark.parametrize(
    ("role", "written", "read"),
    [
        ("actor", "tp1", "tp2"),
        ("actor", "tp2", "pp2"),
        ("actor", "dp2", "tp2"),
        ("critic", "tp1", "tp2"),
        ("critic", "tp2", "pp2"),
        ("critic", "dp2", "tp2"),
        ("critic", "cp2", "dp2_tp2"),
    ],
)
def test_resume_other_layout_continues_the_same_run(
    role: str, written: str, read: str, sharded: bool, ranks: Any, batch: dict[str, Any], uninterrupted: Any
) -> None:
    base, whole = uninterrupted(role, written, sharded)
    world_size, sizes = LAYOUTS[read]
    settings = base | sizes | {"load": base["save"]}
    resumed = run_role(ranks, role, world_size=world_size, batch=batch, settings=settings, steps=2)
    assert {r["start"] for r in resumed} == {2}
    # The loss of step 3 rests on the loaded weights, that of step 4 on the loaded moments of Adam too.
    ours, theirs = (
        [m["loss"] for m in next(r["metrics"] for r in runs if r["metrics"][0] is not None)[-2:]]
        for runs in (resumed, whole)
    )
    print(f"{role:7}{written:>5} to {read:8}{'sharded' if sharded else 'plain':8} {np.abs(np.subtract(ours, theirs))}")
    assert ours == pytest.approx(theirs, abs=1e-6)
    found, expected = all_weights(resumed), all_weights(whole)
    assert set(found) == set(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, atol=2e-6, err_msg=name)


def test_resume_with_another_learning_rate_runs_at_the_new_one(
    ranks: Any, model_folder: Callable[..., str], batch: dict[str, Any], tmp_path: Path
) -> None:
    base = {"hf_checkpoint": model_folder("llama", tied=True), "save": str(tmp_path)}
    sft(ranks, batch, base | {"lr": 1e-2}, steps=1, save_at=(1,))
    (resumed,) = sft(ranks, batch, base | {"lr": 3e-3, "load": str(tmp_path)}, steps=1)
    assert resumed["metrics"][0]["lr"] == 3e-3


@pytest.mark.parametrize("layout", [{}, TP2], ids=["tp1", "tp2"])
def test_reference_of_an_earlier_step_leaks_into_no_later_load(
    layout: dict[str, Any], ranks: Any, model_folder: Callable[..., str], batch: dict[str, Any], tmp_path: Path
) -> None:
    # faults.md row 39: the reference's step is not the actor's; row 40: what engines get is the actor, also where
    # nothing was trained since the resume
    root, world_size = tmp_path / "ckpt", 2 if layout else 1
    base = {"hf_checkpoint": model_folder("llama", tied=True), "lr": 1e-2, "save": str(root), **layout}
    arguments: dict[str, Any] = {"ranks": ranks, "batch": batch, "world_size": world_size}
    early = sft(**arguments, settings=base, steps=1, save_at=(1,))
    late = sft(**arguments, settings=base | {"load": str(root)}, steps=2, save_at=(3,))
    referring = base | {"load": str(root), "ref_load": str(root / "iter_0000001")}
    referring |= {"use_kl_loss": True, "kl_loss_coef": 0.1}

    def log_probs(results: list[dict[str, Any]], column: str) -> np.ndarray:
        read = next(result[column] for result in results if result[column] is not None)
        return np.concatenate([read[index] for index in batch["sample_indices"]])

    def assert_resumed(found: list[dict[str, Any]], start: int, expected: list[dict[str, Any]]) -> None:
        assert {result["start"] for result in found} == {start}
        # what is gathered for the engines, what the actor reads, what the reference reads
        assert_equal_bits(all_weights(found), all_weights(expected))
        for column, source, other in (("read", expected, early), ("reference", early, expected)):
            ours = log_probs(found, column)
            np.testing.assert_allclose(ours, log_probs(source, "read"), atol=2e-6)
            assert np.abs(ours - log_probs(other, "read")).max() > 1e-2

    assert_resumed(sft(**arguments, settings=referring, steps=0), 3, late)
    on = sft(**arguments, settings=referring, steps=1, save_at=(4,))
    assert (root / "latest").read_text() == "iter_0000004\n"
    assert_resumed(sft(**arguments, settings=referring, steps=0), 4, on)


def save_actor(ranks: Any, batch: dict[str, Any], model: str, root: Path) -> tuple[str, dict[str, np.ndarray]]:
    settings = {"hf_checkpoint": model, **ACTOR, "save": str(root)}
    (result,) = sft(ranks, batch, settings, steps=1, save_at=(1,))
    return str(root), result["weights"]


@pytest.fixture(scope="module")
def saved_actor(
    ranks: Any, model_folder: Callable[..., str], batch: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, np.ndarray]]:
    """A trained actor's checkpoint folder and its weights."""
    return save_actor(ranks, batch, model_folder("llama", tied=True), tmp_path_factory.mktemp("actor"))


@pytest.fixture(scope="module")
def saved_untied(
    ranks: Any, model_folder: Callable[..., str], batch: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, np.ndarray]]:
    """As `saved_actor`, of a model with an output layer of its own."""
    return save_actor(ranks, batch, model_folder("llama", tied=False), tmp_path_factory.mktemp("untied_actor"))


@pytest.mark.parametrize("at", ["publish_json", "write_checkpoint_manifest", "publish_folder", "publish_bytes"])
def test_save_killed_between_files_leaves_previous_checkpoint(
    at: str, ranks: Any, model_folder: Callable[..., str], batch: dict[str, Any], tmp_path: Path
) -> None:
    settings = {"hf_checkpoint": model_folder("llama", tied=True), **ACTOR, "save": str(tmp_path / "ckpt")}
    (names,) = ranks("killed_save", world_size=1, at=at, batch=batch, settings=settings)
    assert "iter_0000001" in names
    assert ("iter_0000002" in names) == (at == "publish_bytes")
    (found,) = ranks(
        "load",
        world_size=1,
        role="actor",
        settings=settings | {"load": settings["save"]},
        forward_only=True,
    )
    assert (found["error"], found["iteration"]) == (None, 1)
    # The run that comes after saves the same iteration again, over whatever the killed one left.
    (again,) = sft(ranks, batch, settings | {"load": settings["save"]}, steps=1, save_at=(2,))
    assert again["start"] == 1
    assert (tmp_path / "ckpt" / "latest").read_text() == "iter_0000002\n"


def test_save_that_one_rank_cannot_write_fails_on_all_and_leaves_previous(
    ranks: Any, model_folder: Callable[..., str], batch: dict[str, Any], tmp_path: Path
) -> None:
    settings = {
        "hf_checkpoint": model_folder("llama", tied=True),
        **ACTOR,
        "save": str(tmp_path),
        "tensor_model_parallel_size": 2,
    }
    messages = ranks("failing_save", world_size=2, batch=batch, settings=settings, largest_file=20_000)
    for message in messages:
        assert "rank 1 could not write its shard" in message and str(tmp_path) in message
    assert (tmp_path / "latest").read_text() == "iter_0000001\n"
    assert not (tmp_path / "iter_0000002").exists()


def copy_of(root: str, target: Path) -> Path:
    import shutil

    shutil.copytree(root, target)
    return target / "iter_0000001"


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "add", "no_manifest"])
def test_load_damaged_checkpoint_is_refused_by_file(
    damage: str, saved_actor: Any, ranks: Any, model_folder: Callable[..., str], tmp_path: Path
) -> None:
    folder = copy_of(saved_actor[0], tmp_path / "copy")
    victim = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = victim.read_bytes()
    if damage == "truncate":
        victim.write_bytes(data[:-1])
    elif damage == "flip":
        victim.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    elif damage == "delete":
        victim.unlink()
    elif damage == "add":
        victim = folder / "more"
        victim.write_bytes(b"")
    else:
        victim = folder
        (folder / "checkpoint_manifest.json").unlink()
    settings = {"hf_checkpoint": model_folder("llama", tied=True), "load": str(tmp_path / "copy")}
    # Two data-parallel ranks: each checks half of the files, and both must refuse.
    for found in ranks("load", world_size=2, role="actor", settings=settings, forward_only=True):
        assert found["error"] is not None and str(victim) in found["error"]


@pytest.mark.parametrize(
    ("role", "settings", "field"),
    [
        pytest.param("actor", {"model": ("qwen2", True)}, "architecture.model_type", id="other_model"),
        pytest.param("actor", {"model": ("llama", False)}, "architecture.tied_embeddings", id="untied"),
        pytest.param("critic", {"model": ("qwen3", True)}, "architecture.model_type", id="bootstrap_other_model"),
        pytest.param("actor", {"use_distributed_optimizer": True}, "--use-distributed-optimizer", id="optimizer"),
    ],
)
def test_load_checkpoint_of_another_run_is_refused_by_field(
    role: str, settings: dict[str, Any], field: str, saved_actor: Any, ranks: Any, model_folder: Callable[..., str]
) -> None:
    kind, tied = settings.pop("model", ("llama", True))
    wanted = {"hf_checkpoint": model_folder(kind, tied=tied), "load": saved_actor[0], **settings}
    (found,) = ranks("load", world_size=1, role=role, settings=wanted, forward_only=False)
    assert found["error"] is not None and field in found["error"]


def test_load_folder_without_checkpoint_is_refused(
    ranks: Any, model_folder: Callable[..., str], tmp_path: Path
) -> None:
    settings = {"hf_checkpoint": model_folder("llama", tied=True), "load": str(tmp_path)}
    (found,) = ranks("load", world_size=1, role="actor", settings=settings, forward_only=True)
    assert found["error"] is not None and str(tmp_path) in found["error"] and "latest" in found["error"]


@pytest.mark.parametrize("layout", ["tp1", "tp2", "pp2"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_critic_from_actor_checkpoint_has_its_trunk_and_only_the_head_new(
    tied: bool, layout: str, saved_actor: Any, saved_untied: Any, ranks: Any, model_folder: Callable[..., str]
) -> None:
    # faults.md row 48: the output layer of an untied actor stays behind too
    root, weights = saved_actor if tied else saved_untied
    trunk = {name: array for name, array in weights.items() if name != "lm_head.weight"}
    assert len(weights) - len(trunk) == (0 if tied else 1)
    sizes = {
        "tp1": {},
        "tp2": {"tensor_model_parallel_size": 2},
        "pp2": {"pipeline_model_parallel_size": 2},
    }[layout]
    settings = {"hf_checkpoint": model_folder("llama", tied=tied), "load": root, **sizes}
    results = ranks("load", world_size=2 if sizes else 1, role="critic", settings=settings, forward_only=False)
    assert {r["iteration"] for r in results} == {0}
    found = all_weights(results)
    assert set(found) - set(trunk) == {"head.weight", "head.bias"}
    assert_equal_bits({name: found[name] for name in trunk}, trunk)
    assert found["head.weight"].shape == (1, 32) and not found["head.bias"].any()


def test_critic_resumes_with_its_head_and_refuses_another_head(
    ranks: Any, model_folder: Callable[..., str], batch: dict[str, Any], tmp_path: Path
) -> None:
    # faults.md row 51: a tied model over two stages, where a tied critic would wait for ever; row 49: what the
    # manifest says of role and head.
    base = {
        "hf_checkpoint": model_folder("llama", tied=True),
        "pipeline_model_parallel_size": 2,
        "critic_lr": 1e-2,
        "value_loss_type": "classification",
        "value_num_bins": 11,
        "critic_save": str(tmp_path),
    }
    trained = ranks("train", world_size=2, role="critic", objective="value", batch=batch, settings=base, save_at=(1,))
    resume = base | {"critic_load": str(tmp_path)}
    loaded = ranks("load", world_size=2, role="critic", settings=resume, forward_only=True)
    assert {r["iteration"] for r in loaded} == {1}
    assert_equal_bits(all_weights(loaded), all_weights(trained))
    manifest = json.loads((tmp_path / "iter_0000001" / "checkpoint_manifest.json").read_text())
    assert manifest["facts"]["role"] == "critic"
    assert manifest["facts"]["head"] == {"width": 11, "loss_type": "classification", "reward_range": [0.0, 1.0]}

    for changed, field in (
        ({"value_num_bins": 51}, "value_head.width"),
        ({"value_reward_range": (0.0, 2.0)}, "value_head.reward_range"),
        ({"value_loss_type": "mse"}, "value_head.width"),
    ):
        for found in ranks("load", world_size=2, role="critic", settings=resume | changed, forward_only=True):
            assert found["error"] is not None and field in found["error"]
    (as_actor,) = ranks(
        "load",
        world_size=1,
        role="actor",
        settings={"hf_checkpoint": base["hf_checkpoint"], "load": str(tmp_path)},
        forward_only=True,
    )
    assert "role is 'critic'" in as_actor["error"]


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_load_weights_only_starts_a_fresh_optimizer(
    role: str, ranks: Any, model_folder: Callable[..., str], batch: dict[str, Any], tmp_path: Path
) -> None:
    # faults.md row 43: a warm start keeps the weights, takes this run's learning rate and begins at step 0; Adam's
    # first update from nothing is the learning rate in every weight, with moments of other rows it is not
    prefix = "critic_" if role == "critic" else ""
    settings = {"hf_checkpoint": model_folder("llama", tied=True), f"{prefix}lr_warmup_iters": 4}
    halves = [{name: column[rows] for name, column in batch.items()} for rows in (slice(4), slice(4, None))]
    saving = settings | {"save": str(tmp_path)}
    (seed,) = run_role(ranks, role, settings=saving, steps=1, save_at=(1,), world_size=1, batch=halves[0])
    again = settings | {"load": str(tmp_path)}
    arguments: dict[str, Any] = {"world_size": 1, "batch": halves[1]}
    rate = {f"{prefix}lr": 4e-3}

    def share_moved_by_the_rate(run: dict[str, Any]) -> float:
        moved = np.concatenate([np.abs(w - seed["weights"][name]).ravel() for name, w in run["weights"].items()])
        moved = moved[moved > 0] / run["metrics"][0]["lr"]
        return float((np.abs(moved - 1) < 0.01).mean())

    (fresh,) = run_role(ranks, role, settings=again | rate, steps=1, weights_only=True, **arguments)
    (resumed,) = run_role(ranks, role, settings=again | rate, steps=1, **arguments)
    assert (fresh["start"], resumed["start"]) == (1, 1)
    assert fresh["metrics"][0]["lr"] == pytest.approx(1e-3)
    assert resumed["metrics"][0]["lr"] == pytest.approx(2e-3)
    assert fresh["metrics"][0]["loss"] == resumed["metrics"][0]["loss"]
    assert share_moved_by_the_rate(fresh) > 0.9 > 0.5 > share_moved_by_the_rate(resumed)
