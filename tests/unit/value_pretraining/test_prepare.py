"""Everything `train_value.py` refuses before a device is reserved, with its message, and within 2 s."""

import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest

from miles.value_pretraining import (
    check_token_budget,
    load_value_pretrain_manifest,
    prepare_value_pretraining,
    write_value_pretrain_contract,
)


@pytest.fixture
def make_args(make_manifest, value_row, tmp_path):
    """make_args(**changes) -> the arguments of a run on 8 train and 8 held-out rows of two labels."""

    def make(heldout=True, **changes):
        rows = [value_row(i, label=float(i % 2)) for i in range(16)]
        path = make_manifest(rows[:8], heldout=rows[8:] if heldout else None)
        args = {
            "value_pretrain_manifest": str(path),
            "value_pretrain_manifest_sha256": None,
            "value_pretrain_epochs": 2,
            "value_pretrain_eval_only": False,
            "value_pretrain_eval_split": "heldout",
            "value_pretrain_eval_num_batches": None,
            "value_pretrain_eval_report": None,
            "value_pretrain_canary_one_step": False,
            "train_backend": "megatron",
            "critic_load": None,
            "critic_save": str(tmp_path / "critic"),
            "critic_value_pretrain_contract_sha256": None,
            "critic_num_nodes": 1,
            "critic_num_gpus_per_node": 2,
            "seed": 7,
            "global_batch_size": 4,
            "micro_batch_size": 1,
            "use_dynamic_batch_size": False,
        }
        return SimpleNamespace(**{**args, **changes})

    return make


@pytest.fixture
def make_eval_args(make_args, tmp_path):
    """make_eval_args(**changes) -> arguments that evaluate a contracted critic of step 3."""

    def make(**changes):
        args = make_args(
            **{
                "value_pretrain_eval_only": True,
                "value_pretrain_eval_num_batches": 2,
                "value_pretrain_eval_report": str(tmp_path / "report.json"),
                "critic_load": str(tmp_path / "critic"),
                "critic_save": None,
                **changes,
            }
        )
        contract(args, tmp_path / "critic")
        return args

    return make


def contract(args, folder, completed_steps=3):
    write_value_pretrain_contract(
        folder,
        manifest=load_value_pretrain_manifest(args.value_pretrain_manifest),
        completed_steps=completed_steps,
        model_identity="toy",
        seed=7,
        global_batch_size=4,
    )


def prepare(args, model_parallel_size=1):
    return prepare_value_pretraining(args, model_parallel_size=model_parallel_size)


def test_prepare_training_reads_the_train_split_whatever_the_eval_split(make_args):
    plan = prepare(make_args())
    assert (plan.dataset.spec.path.name, len(plan.dataset)) == ("train.jsonl", 8)
    assert (plan.dp_size, plan.num_steps, plan.resume_after) == (2, 4, 0)
    assert plan.resume is None
    assert plan.eval_batches is None


def test_prepare_resume_starts_after_the_contract(make_args, tmp_path):
    args = make_args(critic_load=str(tmp_path / "critic"))
    contract(args, tmp_path / "critic")
    assert prepare(args).resume_after == 3


def test_prepare_evaluation_draws_disjoint_mixed_batches_of_the_split(make_eval_args):
    plan = prepare(make_eval_args())
    assert plan.dataset.spec.path.name == "heldout.jsonl"
    assert plan.eval_batches is not None
    assert sorted(i for batch in plan.eval_batches for i in batch) == list(range(8))
    assert prepare(make_eval_args(value_pretrain_eval_split="train")).dataset.spec.path.name == "train.jsonl"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"value_pretrain_manifest": None}, ValueError, "train_value.py requires --value-pretrain-manifest"),
        ({"value_pretrain_manifest": "nowhere.json"}, FileNotFoundError, "manifest does not exist: nowhere.json"),
        ({"train_backend": "fsdp"}, ValueError, "currently requires --train-backend megatron"),
        ({"value_pretrain_manifest_sha256": "0" * 64}, ValueError, "manifest SHA-256 mismatch: expected 0000"),
        ({"critic_save": None}, ValueError, "requires --critic-save"),
        ({"global_batch_size": 16}, ValueError, "at least one complete global batch"),
        ({"global_batch_size": 3}, ValueError, "global_batch_size=3 must be divisible by critic DP size 2"),
        ({"micro_batch_size": 3}, ValueError, "local critic batch size 2 must be divisible by micro_batch_size=3"),
    ],
)
def test_prepare_training_refusals(make_args, changes, error, message):
    with pytest.raises(error, match=message):
        prepare(make_args(**changes))


def test_prepare_devices_not_divisible_by_model_parallel_size_is_refused(make_args):
    with pytest.raises(ValueError, match="critic device count 2 is not divisible by model-parallel size 4"):
        prepare(make_args(), model_parallel_size=4)


def test_prepare_dynamic_batches_need_no_divisible_micro_batch(make_args):
    assert prepare(make_args(micro_batch_size=3, use_dynamic_batch_size=True)).dp_size == 2


def test_token_budget_that_cannot_hold_the_longest_row_is_refused(make_args):
    args = make_args(use_dynamic_batch_size=True, context_parallel_size=2, max_tokens_per_gpu=2)
    dataset = prepare(args).dataset
    longest = max(len(dataset.get(row).tokens) for row in range(len(dataset)))
    args.max_tokens_per_gpu = -(-longest // 2)
    check_token_budget(dataset, args)
    args.max_tokens_per_gpu = (longest - 1) // 2
    with pytest.raises(
        ValueError, match=rf"2 context-parallel ranks cannot hold the longest row of .*, of {longest} t"
    ):
        check_token_budget(dataset, args)
    args.use_dynamic_batch_size = False
    check_token_budget(dataset, args)


def test_prepare_bad_row_is_refused_with_path_and_line(make_args, make_manifest, value_row):
    args = make_args()
    make_manifest([value_row(0), value_row(1, response_length=9)])
    with pytest.raises(ValueError, match=r"train\.jsonl:2: response_length 9 must leave"):
        prepare(SimpleNamespace(**{**vars(args), "global_batch_size": 2}))


def test_prepare_data_changed_since_the_manifest_is_refused(make_args, tmp_path):
    args = make_args()
    (tmp_path / "train.jsonl").write_bytes(b"{}\n")
    with pytest.raises(ValueError, match="dataset SHA-256 mismatch for"):
        prepare(args)


def test_prepare_canary_over_a_contract_is_refused_before_anything_is_read(make_args, tmp_path):
    args = make_args(value_pretrain_canary_one_step=True)
    prepare(args)
    contract(args, tmp_path / "critic")
    args.value_pretrain_manifest = "nowhere.json"
    with pytest.raises(ValueError, match="canary output already contains a production contract"):
        prepare(args)


def test_prepare_checkpoint_past_the_plan_is_refused_in_training_only(make_args, make_eval_args, tmp_path):
    args = make_args(critic_load=str(tmp_path / "critic"))
    contract(args, tmp_path / "critic", completed_steps=5)
    with pytest.raises(ValueError, match="critic checkpoint step 5 exceeds the 4-step batch plan"):
        prepare(args)
    contract(args, tmp_path / "critic", completed_steps=4)
    with pytest.raises(ValueError, match="no step is left: the checkpoint already holds all 4 steps"):
        prepare(args)
    assert prepare(SimpleNamespace(**{**vars(args), "value_pretrain_epochs": 3})).resume_after == 4
    evaluation = make_eval_args()
    contract(evaluation, tmp_path / "critic", completed_steps=5)
    assert prepare(evaluation).resume_after == 5


def test_prepare_records_where_the_data_lie_in_truth(make_args, tmp_path):
    args = make_args()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "train.jsonl").rename(tmp_path / "elsewhere" / "rows.jsonl")
    (tmp_path / "train.jsonl").symlink_to(tmp_path / "elsewhere" / "rows.jsonl")
    record = prepare(args).data_record()
    assert record["train"]["path"] == str((tmp_path / "elsewhere" / "rows.jsonl").resolve())
    assert record["heldout"]["path"] == str((tmp_path / "heldout.jsonl").resolve())
    assert record["manifest"]["path"] == str((tmp_path / "manifest.json").resolve())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"value_pretrain_eval_report": None}, ValueError, "requires --value-pretrain-eval-report"),
        ({"value_pretrain_eval_num_batches": None}, ValueError, "requires --value-pretrain-eval-num-batches"),
        ({"value_pretrain_eval_report": "/nowhere/r"}, FileNotFoundError, "folder does not exist: /nowhere"),
        ({"heldout": False}, ValueError, "manifest has no heldout split"),
        ({"critic_load": None}, ValueError, "requires a contracted value checkpoint"),
        ({"critic_value_pretrain_contract_sha256": "0" * 64}, ValueError, "contract SHA-256 mismatch"),
        ({"value_pretrain_eval_num_batches": 3}, ValueError, "requires disjoint rows: 3 batches of 4 need 12"),
    ],
)
def test_prepare_evaluation_refusals(make_eval_args, changes, error, message):
    with pytest.raises(error, match=message):
        prepare(make_eval_args(**changes))


def test_prepare_report_that_exists_is_refused(make_eval_args, tmp_path):
    (tmp_path / "report.json").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="already exists and is never replaced"):
        prepare(make_eval_args())


def test_prepare_resume_with_another_seed_is_refused(make_args, tmp_path):
    args = make_args(critic_load=str(tmp_path / "critic"), seed=8)
    contract(args, tmp_path / "critic")
    with pytest.raises(ValueError, match="different deterministic batch plan"):
        prepare(args)


def test_value_modules_import_fast_without_torch_ray_or_megatron():
    code = (
        "import sys, miles.value_pretraining, miles.value_evaluation\n"
        "assert not {'torch', 'ray', 'megatron', 'transformers'} & set(sys.modules)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    # Processor time: a busy machine makes nothing of ours slower.
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 2.0
