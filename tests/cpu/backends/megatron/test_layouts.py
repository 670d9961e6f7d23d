"""Loss and gradient do not depend on how a batch is laid out: over which ranks, in which micro-batches, in which form.

Each layout runs once, in real processes, over every objective; its gradients, in Hugging Face names, are compared with
one process that takes the whole batch as one padded micro-batch. That run ends at an independent implementation in
test_training.py (transformers and plain PyTorch).
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
SP = {"sequence_parallel": True}
SHARDED = {"use_distributed_optimizer": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {}),
    "tp2": (2, TP2),
    "tp2_sp": (2, TP2 | SP),
    "pp2": (2, PP2),
    "dp2": (2, {}),
    "dp2_sharded": (2, SHARDED),
    "cp2": (2, CP2),
    "tp2_pp2": (4, TP2 | PP2),
    "dp2_tp2": (4, TP2),
    "dp2_tp2_sp_sharded": (4, TP2 | SP | SHARDED),
    "dp2_cp2_sharded": (4, CP2 | SHARDED),
    "cp2_tp2_sp": (4, CP2 | TP2 | SP),
    "dp2_pp2_sharded": (4, PP2 | SHARDED),
    "tp2_sp_pp2": (4, TP2 | SP | PP2),
    "cp2_pp2": (4, CP2 | PP2),
}
ALL_PAIRS = ("dp2", "dp2_pp2_sharded", "tp2_sp_pp2", "cp2_pp2")
"""Layouts that between them split over everything, for what needs no more."""
BINS = {"value_loss_type": "classification", "value_num_bins": 11}
# Adam's first update is lr * g / (|g| + eps) on bias-corrected moments: smooth in g where eps is large.
SMOOTH = {"lr": 0.5, "critic_lr": 0.5, "adam_eps": 1.0, "clip_grad": 0.02}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "actor": ("actor", {}),
    "critic_mse": ("critic", {}),
    "critic_bins": ("critic", BINS),
    "critic_frozen": ("critic", BINS | {"critic_freeze_attention": True}),
}
MIS = {"ratio_correction": "mis", "mis_level": "sequence", "mis_mode": "clip", "mis_high": 3.0}
TIS = {"ratio_correction": "tis", "tis_clip": 1.1}
ICEPOP = {"ratio_correction": "icepop", "icepop_low": 0.8, "icepop_high": 1.4}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}
THOROUGH = ("ppo_entropy", "gspo")
POLICIES: dict[str, dict[str, Any]] = {
    "ppo_entropy": {"entropy_coef": 0.01, "rollout_temperature": 0.7},
    "ppo_dual_clip": {"eps_clip_c": 1.5, "loss_agg_mode": "seq-mean-token-sum"},
    "ppo_on_policy": {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_agg_length": 12},
    "ppo_of_segments": {"loss_agg_mode": "seq-mean-token-mean"},
    "gspo": {"policy_objective": "gspo", "eps_clip": 0.1, "loss_agg_mode": "seq-mean-token-mean"},
    "cispo": {"policy_objective": "cispo", "eps_clip_high": 0.28},
    "sao_dis": {"policy_objective": "sao_dis", "eps_clip": 0.3, "eps_clip_high": 1.0},
    "sao_dis_in_graph": {"policy_objective": "sao_dis", "eps_clip_high": 4.0, "ratio_grad": "in_graph"},
    "decoupled_ppo": {"policy_objective": "decoupled_ppo"},
    "tis": TIS,
    "icepop": ICEPOP,
    "mis_sequence": MIS | {"mis_batch_normalize": True, "mis_veto": 0.65},
    "mis_geometric": MIS | {"mis_level": "geometric", "mis_high": 1.2, "mis_reject_low": 0.9, "mis_reject_high": 1.6},
    "opsm": {"use_opsm": True},
    "kl_k1": KL | {"kl_loss_type": "k1"},
    "kl_k2": KL | {"kl_loss_type": "k2"},
    "kl_k3": KL | {"kl_loss_type": "k3"},
    "kl_low_var": KL | {"kl_loss_type": "low_var_kl"},
    "kl_unbiased": KL | {"use_unbiased_kl": True},
}
COMBINED: dict[str, dict[str, Any]] = {
    "mis_token": MIS
    | {"mis_level": "token", "mis_mode": "truncate", "mis_high": 1.2, "mis_reject_low": 0.4, "mis_reject_high": 2.5},
    "mis_sequence_truncate": MIS | {"mis_mode": "truncate"},
    "mis_sequence_mask": MIS | {"mis_mode": "mask"},
    "mis_geometric_truncate": MIS | {"mis_level": "geometric", "mis_mode": "truncate", "mis_high": 1.2},
    "mis_geometric_mask": MIS | {"mis_level": "geometric", "mis_mode": "mask", "mis_high": 1.2},
    "tis_both_bounds": TIS | {"tis_clip_low": 0.9},
    "tis_on_policy": TIS,
    "gspo_mis_kl": {"policy_objective": "gspo", "eps_clip": 0.1, "loss_agg_mode": "seq-mean-token-mean"}
    | (MIS | KL | {"kl_loss_type": "k2"}),
    "gspo_icepop_opsm": {"policy_objective": "gspo", "eps_clip": 0.1, "use_opsm": True} | ICEPOP,
    "cispo_tis_kl_entropy": {"policy_objective": "cispo", "eps_clip_high": 0.28, "entropy_coef": 0.01}
    | (TIS | KL | {"kl_loss_type": "k3"}),
    "decoupled_dual_clip": {"policy_objective": "decoupled_ppo", "eps_clip_c": 1.5},
}
# How the batch is cut: settings of the schedule, packed or padded, order of the rows. "single_rows" has an empty
# micro-batch more, as a rank with fewer rows than others has.
FORMS: dict[str, tuple[dict[str, Any], bool, list[int]]] = {
    "whole": ({"micro_batch_size": 8}, False, [0, 1, 2, 3, 4, 5, 6, 7]),
    "packed": ({"micro_batch_size": 2}, True, [0, 1, 2, 3, 4, 5, 6, 7]),
    "padded": ({"micro_batch_size": 4}, False, [0, 1, 2, 3, 4, 5, 6, 7]),
    "single_rows": ({"micro_batch_size": 1}, False, [2, 0, 5, 1, 7, 6, 4, 3]),
    "budget": ({"use_dynamic_batch_size": True, "max_tokens_per_gpu": 50}, True, [3, 7, 0, 2, 6, 1, 5, 4]),
}
ALL_FORMS = ("packed", "padded", "single_rows", "budget")


Columns = dict[str, Any]
TRAJECTORIES = [0, 1, 2, 3, 3, 4, 5, 5]
"""Rows 3 and 4, and 6 and 7, are of one trajectory each, where an objective has such."""


def on_policy(batch: Columns) -> Columns:
    return {name: column for name, column in batch.items() if name != "old_log_probs"}


def unclipped(batch: Columns) -> Columns:
    return {name: column for name, column in batch.items() if name != "values"}


def segments(batch: Columns) -> Columns:
    return {**batch, "compaction_trajectory_ids": [index % 3 for index in batch["sample_indices"]]}


def siblings(batch: Columns) -> Columns:
    return {**batch, "rewards": [1.0, 0.0, 0.5, 1.0, 1.0, 0.25, 0.0, 0.0], "trajectory_ids": TRAJECTORIES}


def compacted(batch: Columns) -> Columns:
    counts = [sum(mask) for mask in batch["loss_masks"]]
    return {
        **batch,
        "rewards": siblings(batch)["rewards"],
        "compaction_trajectory_ids": TRAJECTORIES,
        "compaction_subsequent_active_tokens": [0, 0, 0, counts[4], 0, 0, counts[7], 0],
        "compaction_trajectory_active_tokens": [
            *counts[:3], *[counts[3] + counts[4]] * 2, counts[5], *[counts[6] + counts[7]] * 2
        ],
    }  # fmt: skip


def second_half_masked(batch: Columns) -> Columns:
    """In the form "padded" the second of two data-parallel ranks has no trainable token at all."""
    masks = batch["loss_masks"]
    return {**batch, "loss_masks": [*masks[:4], *([0] * len(mask) for mask in masks[4:])]}


def own_estimator(batch: Any, options: Any) -> tuple[np.ndarray, np.ndarray]:
    """As a file of the user's might have it."""
    advantages_A = batch.rewards_N[batch.row_A] - options.gamma / 2
    return advantages_A, batch.rewards_N[batch.row_A]


@dataclass(frozen=True)
class Objective:
    model: str
    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    forms: tuple[str, ...] = ALL_FORMS
    estimator: dict[str, Any] | None = None
    """How advantages and returns come from the rewards of the whole batch; None takes given ones."""
    prepare: Callable[[Columns], Columns] = dict
    """What becomes of the batch before its rows are dealt."""
    layouts: tuple[str, ...] = tuple(LAYOUTS)


TWELVE = tuple(LAYOUTS)[:12]
ESTIMATORS = ("gae", "gae_adaptive", "monte_carlo", "grpo", "dr_grpo", "rloo", "reinforce_plus_plus")
OBJECTIVES = {
    "likelihood": Objective("actor", "likelihood"),
    "value_mse": Objective("critic_mse", "value"),
    "value_mse_of_gae": Objective("critic_mse", "value", estimator={"estimator": "gae", "lam": 0.9}),
    "value_mse_of_penalised_gae": Objective(
        "critic_mse",
        "value",
        forms=("budget",),
        estimator={"estimator": "gae", "gamma": 0.97, "lam": 0.9, "critic_lam": 0.5, "kl_coef": 0.1},
        layouts=ALL_PAIRS,
    ),
    "value_mse_unclipped": Objective(
        "critic_mse", "value", forms=("padded", "budget"), prepare=unclipped, layouts=ALL_PAIRS
    ),
    "value_hl_gauss": Objective("critic_bins", "value"),
    "value_two_hot": Objective("critic_bins", "value", {"value_target_type": "two_hot"}),
    "value_frozen_attention": Objective("critic_frozen", "value"),
    **{
        name: Objective(
            "actor",
            "policy",
            settings,
            ALL_FORMS if name in THOROUGH else ("padded", "budget"),
            prepare={"ppo_on_policy": on_policy, "ppo_of_segments": segments}.get(name, dict),
            layouts=tuple(LAYOUTS) if name in THOROUGH else TWELVE,
        )
        for name, settings in POLICIES.items()
    },
    **{
        name: Objective(
            "actor",
            "policy",
            settings,
            ("padded", "budget"),
            prepare=on_policy if name == "tis_on_policy" else dict,
            layouts=ALL_PAIRS,
        )
        for name, settings in COMBINED.items()
    },
    **{
        f"estimator_{name}": Objective(
            "actor",
            "policy",
            forms=("budget",),
            estimator={"estimator": name, "lam": 0.9},
            layouts=TWELVE,
        )
        for name in (*ESTIMATORS, "reinforce_plus_plus_baseline")
    },
    "estimator_gae_whitened": Objective(
        "actor",
        "policy",
        forms=("budget",),
        estimator={"estimator": "gae", "gamma": 0.95, "normalize": True},
        layouts=TWELVE,
    ),
    # What an estimator makes of its batch is made once for all ranks, so that two layouts suffice.
    **{
        f"estimator_{name}": Objective(
            "actor",
            "policy",
            forms=("budget",),
            estimator={"estimator": estimator, "gamma": 0.97, "lam": 0.9} | more,
            prepare=prepare,
            layouts=("dp2", "cp2_pp2"),
        )
        for name, estimator, more, prepare in (
            ("gae_two_lambdas_kl", "gae", {"critic_lam": 1.0, "kl_coef": 0.1}, dict),
            ("gae_compacted", "gae", {}, compacted),
            ("gae_adaptive_compacted", "gae_adaptive", {"normalize": True}, compacted),
            ("monte_carlo_compacted", "monte_carlo", {"normalize": True}, compacted),
            ("monte_carlo_kl", "monte_carlo", {"kl_coef": 0.1}, dict),
            ("grpo_siblings_kl", "grpo", {"kl_coef": 0.1}, siblings),
            ("dr_grpo_siblings_kl", "dr_grpo", {"kl_coef": 0.1, "normalize": True}, siblings),
            ("rloo_siblings_kl", "rloo", {"kl_coef": 0.1}, siblings),
            ("reinforce_plus_plus_kl", "reinforce_plus_plus", {"kl_coef": 0.1}, dict),
            ("baseline_siblings_kl", "reinforce_plus_plus_baseline", {"kl_coef": 0.1}, siblings),
            ("of_a_file", own_estimator, {}, dict),
        )
    },
    # faults.md row 11: one of two data-parallel ranks has nothing to train on in the whole step.
    **{
        f"{name}_masked_rank": Objective(
            model,
            kind,
            settings,
            ("padded",),
            prepare=second_half_masked,
            layouts=("dp2", "dp2_sharded", "dp2_cp2_sharded", "dp2_pp2_sharded"),
        )
        for name, model, kind, settings in (
            ("likelihood", "actor", "likelihood", {}),
            ("value_mse", "critic_mse", "value", {}),
            ("value_hl_gauss", "critic_bins", "value", {}),
            ("ppo_icepop", "actor", "policy", ICEPOP),
        )
    },
}
CASES = [(name, layout) for name, objective in OBJECTIVES.items() for layout in objective.layouts]
BANDS = ("clipped_low", "clipped_high")
FIRES: dict[str, tuple[str, ...]] = {
    "value_mse": ("value_clipped",),
    "ppo_entropy": BANDS,
    "ppo_dual_clip": ("dual_clipped",),
    "gspo": BANDS,
    "cispo": BANDS,
    "sao_dis": ("rejected_low", "rejected_high"),
    "sao_dis_in_graph": ("rejected_low",),
    "decoupled_ppo": BANDS,
    "tis": ("correction_bounded",),
    "icepop": ("correction_rejected",),
    "mis_sequence": ("correction_bounded", "correction_rejected"),
    "mis_geometric": ("correction_bounded", "correction_rejected"),
    "opsm": ("opsm_dropped",),
    "mis_token": ("correction_bounded", "correction_rejected"),
    "mis_sequence_truncate": ("correction_bounded",),
    "mis_sequence_mask": ("correction_rejected",),
    "mis_geometric_truncate": ("correction_bounded",),
    "mis_geometric_mask": ("correction_rejected",),
    "tis_both_bounds": ("correction_bounded",),
    "tis_on_policy": ("correction_bounded",),
    "gspo_mis_kl": (*BANDS, "correction_bounded"),
    "gspo_icepop_opsm": ("clipped", "correction_rejected", "opsm_dropped"),
    "cispo_tis_kl_entropy": ("clipped", "correction_bounded"),
    "decoupled_dual_clip": ("dual_clipped",),
    "ppo_icepop_masked_rank": ("correction_rejected",),
}
"""Metrics of branches that an objective is in the list for."""


def forms_of(objective: Objective, layout: str) -> list[str]:
    """The forms in which an objective runs on a layout; fewer where four ranks share the machine's cores."""
    if layout == "reference":
        return ["whole"]
    if LAYOUTS[layout][0] < 4:
        return list(objective.forms)
    return ["padded", "budget"] if objective.forms == ALL_FORMS else [objective.forms[-1]]


@pytest.fixture(scope="module")
def rows() -> Columns:
    """Eight rows: one without a trainable token, one of a single response token, one with a tool's answer inside.

    Every response ends with the token that fills lines up; the engine is far off in rows 0 and 7, the reference at one
    token of row 3.
    """
    draw = np.random.default_rng(11)
    responses = [5, 3, 1, 12, 4, 7, 2, 9]
    masks = [[1] * n for n in responses]
    masks[1] = [0, 0, 0]
    masks[3] = [1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 0]
    masks[4] = [0, 1, 1, 1]
    batch: Columns = {
        "tokens": [draw.integers(0, 150, n + int(draw.integers(2, 15))).tolist() for n in responses],
        "response_lengths": responses,
        "loss_masks": masks,
        "sample_indices": list(range(100, 108)),
        "returns": [[float(row % 2)] * n for row, n in enumerate(responses)],
        "rewards": [1.0, 0.0, 0.5, 1.0, 0.0, 0.25, 1.0, 0.0],
        "group_indices": [0, 0, 0, 1, 1, 2, 2, 2],
    }
    for name, center, spread in (("advantages", 0.0, 1.0), ("old_log_probs", -5.0, 0.3), ("values", 0.4, 0.2)):
        batch[name] = [(draw.normal(size=n) * spread + center).astype(np.float32) for n in responses]
    for name in ("rollout_log_probs", "ref_log_probs"):
        batch[name] = [(row + draw.normal(size=len(row)) * 0.2).astype(np.float32) for row in batch["old_log_probs"]]
    for tokens in batch["tokens"]:
        tokens[-1] = 0
    batch["rollout_log_probs"][0] += np.float32(0.35)
    batch["rollout_log_probs"][7] -= np.float32(0.3)
    batch["ref_log_probs"][3][8] = -1.0
    pairs = zip(batch["old_log_probs"], batch["ref_log_probs"], strict=True)
    batch["kl"] = [(old - reference) ** 2 / 2 for old, reference in pairs]
    return batch


def runs_of(
    batch: Columns, model: str, layout: str, *, folder: str, sizes: dict[str, Any], dp_size: int
) -> dict[str, dict[str, Any]]:
    """Every objective of a model in every form, and one optimizer step at the end."""
    from miles.algorithms.advantages import compute_advantages_and_returns
    from miles.config import Args
    from miles.data.batch import select_rows
    from miles.ray.rollout.train_data_conversion import build_shards

    runs = {}
    for name, objective in OBJECTIVES.items():
        if objective.model != model or layout not in (*objective.layouts, "reference"):
            continue
        for form in forms_of(objective, layout):
            schedule, packed, order = FORMS[form]
            columns = select_rows(objective.prepare(batch), order)
            if objective.estimator is not None:
                columns["advantages"], columns["returns"] = compute_advantages_and_returns(
                    columns, **objective.estimator
                )
            args = Args.build(hf_checkpoint=folder, **sizes, **schedule, **objective.settings)
            shards = build_shards(args, columns, dp_size=dp_size)
            if objective.prepare is second_half_masked and dp_size > 1:
                assert not any(map(any, shards[-1]["loss_masks"]))
            if form == "single_rows":
                for shard in shards:
                    shard["micro_batches"].append([])
            runs[f"{name}/{form}"] = {
                "objective": objective.kind,
                "shards": shards,
                "packed": packed,
                "changes": objective.settings,
            }
    name, run = next(iter(runs.items()))
    runs["step"] = {**run, "objective": "sft" if name.startswith("likelihood") else "value", "step": True}
    return runs


def joined(results: list[dict[str, Any]], run: str) -> dict[str, Any]:
    """One view of all ranks; what several of them hold must be the same."""
    gradient: dict[str, np.ndarray] = {}
    for result in results:
        for name, array in result[run]["gradient"].items():
            np.testing.assert_array_equal(gradient.setdefault(name, array), array, err_msg=name)
    metrics = [result[run]["metrics"] for result in results if result[run]["metrics"] is not None]
    assert all(other == metrics[0] for other in metrics[1:])
    return {"gradient": gradient, "metrics": metrics[0]}


@pytest.fixture(scope="module")
def results(ranks: Any, model_folder: Callable[..., str], rows: Columns) -> Callable[[str, str], Any]:
    """`results(layout, model)`: {run: {"gradient", "metrics"}}, computed once."""
    cache: dict[tuple[str, str], dict[str, Any]] = {}

    def get(layout: str, model: str) -> dict[str, Any]:
        if (layout, model) not in cache:
            role, extra = MODELS[model]
            world_size, sizes = LAYOUTS.get(layout, (1, {}))
            model_size = np.prod([size for name, size in sizes.items() if name.endswith("_size")], dtype=int)
            folder, dp_size = model_folder("qwen3", tied=True), world_size // int(model_size)
            runs = runs_of(rows, model, layout, folder=folder, sizes=sizes, dp_size=dp_size)
            settings = {"hf_checkpoint": folder, **SMOOTH, **extra, **sizes}
            found = ranks("gradients", world_size=world_size, role=role, settings=settings, runs=runs)
            cache[layout, model] = {run: joined(found, run) for run in runs}
        return cache[layout, model]

    return get


def difference(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> tuple[float, str]:
    """Largest difference of any tensor relative to its own largest entry, and that tensor's name.

    A tensor whose entries are all below a thousandth of the gradient's largest is measured against that.
    """
    assert set(found) == set(expected)
    top = max(float(np.abs(array).max()) for array in expected.values())
    worst = (0.0, "")
    for name, array in expected.items():
        scale = max(float(np.abs(array).max()), 1e-3 * top)
        worst = max(worst, (float(np.abs(found[name] - array).max()) / scale, name))
    return worst


@pytest.mark.parametrize(("objective", "layout"), CASES)
def test_gradient_any_layout_and_split_equals_one_process(
    objective: str, layout: str, results: Any, rows: Columns
) -> None:
    # faults.md rows 25, 26, 28, 29: global denominators, whatever the ranks and micro-batches, of which one has no
    # trainable token; row 11: under cp2 a rank has no token of some rows, and whitening takes the whole batch; row 5:
    # a response token that looks like padding counts.
    model = OBJECTIVES[objective].model
    expected = results("reference", model)[f"{objective}/whole"]
    assert expected["metrics"]["tokens"] == sum(map(sum, OBJECTIVES[objective].prepare(rows)["loss_masks"]))
    assert max(float(np.abs(array).max()) for array in expected["gradient"].values()) > 1e-3
    for form in forms_of(OBJECTIVES[objective], layout):
        found = results(layout, model)[f"{objective}/{form}"]
        gap, name = difference(found["gradient"], expected["gradient"])
        loss, wanted = found["metrics"]["loss"], expected["metrics"]["loss"]
        print(f"{objective:24}{layout:20}{form:12} loss {abs(loss / wanted - 1):.1e} gradient {gap:.1e} {name}")
        assert gap <= 1e-5, f"{form}: {name}"
        assert found["metrics"].keys() == expected["metrics"].keys()
        for metric, value in expected["metrics"].items():
            assert found["metrics"][metric] == pytest.approx(value, rel=1e-5, abs=1e-6), f"{form}: {metric}"


@pytest.mark.parametrize("objective", FIRES)
def test_reference_takes_the_branches_that_an_objective_is_there_for(objective: str, results: Any) -> None:
    metrics = results("reference", OBJECTIVES[objective].model)[f"{objective}/whole"]["metrics"]
    for name in FIRES[objective]:
        assert 0 < metrics[name] < metrics["tokens"], name


@pytest.mark.parametrize("model", MODELS)
def test_reference_has_another_gradient_for_every_objective(model: str, results: Any) -> None:
    """An objective whose gradient is another's would be tested twice, and something else not at all."""
    found = {name: run["gradient"] for name, run in results("reference", model).items() if name.endswith("/whole")}
    for one, other in itertools.combinations(found, 2):
        assert difference(found[one], found[other])[0] > 1e-4, (one, other)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_step_any_layout_clips_by_the_norm_of_the_whole_gradient(
    model: str, layout: str, results: Any, model_folder: Callable[..., str]
) -> None:
    from safetensors.numpy import load_file

    first = next(name for name, objective in OBJECTIVES.items() if objective.model == model)
    gradient = results("reference", model)[f"{first}/whole"]["gradient"]
    norm = np.sqrt(sum(float(np.square(array, dtype=np.float64).sum()) for array in gradient.values()))
    assert norm > 2 * SMOOTH["clip_grad"]
    step = results(layout, model)["step"]
    assert step["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    before = load_file(f"{model_folder('qwen3', tied=True)}/model.safetensors")
    for name, array in before.items():
        clipped = gradient[name] * SMOOTH["clip_grad"] / norm
        expected = array - SMOOTH["lr"] * clipped / (np.abs(clipped) + SMOOTH["adam_eps"])
        np.testing.assert_allclose(step["gradient"][name], expected, atol=1e-6, err_msg=name)
        if model == "critic_frozen":
            assert np.array_equal(step["gradient"][name], array) == (".self_attn." in name), name
