"""What an online run starts from, looked at in the driver; needs neither Ray nor torch, so a mistake is told soon."""

import logging
from pathlib import Path
from typing import Any

from miles.backends.megatron.architecture import Architecture
from miles.backends.megatron.checkpoint_identity import Identity, ValueHeadIdentity, check_identity, find_checkpoint
from miles.config import Args
from miles.config.groups import flag_of
from miles.config.rules import check_value_head
from miles.contracts.artifact import check_checkpoint_listing
from miles.contracts.chain import describe_value_pretraining, iteration_folder
from miles.contracts.value_schema import VALUE_PRETRAIN_CONTRACT_NAME, contract_path
from miles.ray.train_state import check_resume
from miles.utils.tracking_utils.run_folder import STARTED_FROM
from miles.value_pretraining import (
    check_critic_listing,
    check_online_contract,
    check_passed_report,
    check_published_together,
    objective_args,
)

logger = logging.getLogger(__name__)

_HEAD = ("value_loss_type", "value_num_bins", "value_reward_range", "value_target_type", "hl_gauss_sigma_ratio")


def settle(args: Args, state: dict[str, Any] | None) -> Args:
    """Settings with the value head of the critic that the run starts from, whose checkpoints are all looked at.

    On a resume these also say what the run started from, where that was left out.

    Args:
        state: the save that a resumed run goes on from. What the run began with is not read again: it may have gone
            its own way since.

    Raises:
        ValueError: the critic's contract does not match the run, a checkpoint is of another model, or, on a resume,
            something differs from the save, or a setting has no effect with that value head; the message names flag or
            field.
        FileNotFoundError: a contract digest is given, but `--critic-load` holds no contract.
    """
    args = _settled(args, state)
    check_value_head(args)
    return args


def _settled(args: Args, state: dict[str, Any] | None) -> Args:
    if state is not None:
        # Recorded with the rest, so that config.yaml makes the same run again.
        unstated = {name for name in _HEAD if args.source_of(name) == "default"}
        unstated |= {name for name in STARTED_FROM if getattr(args, name) is None}
        unstated = {name: state["settings"][name] for name in unstated}
        args = args.replace(source="resume", **unstated)
        check_identities(check_resume(args, state))
        return args
    if (folder := args.critic_load) is None:
        check_identities(args)
        if args.has_critic and not args.rollout_only:
            logger.info("the critic takes the backbone of %s, its head is new", args.load or args.hf_checkpoint)
        return args
    if args.critic_value_pretrain_contract_sha256 is None and not contract_path(folder).exists():
        if args.critic_value_eval_report is not None:
            raise ValueError(
                f"--critic-load {folder}: holds no {VALUE_PRETRAIN_CONTRACT_NAME} for "
                "--critic-value-eval-report to speak of"
            )
        if contract_path(above := Path(folder).resolve().parent).exists():
            raise ValueError(
                f"--critic-load {folder}: is one checkpoint of the critic whose contract lies in {above}: give that "
                "folder"
            )
        check_identities(args)
        if Identity.read(find_checkpoint(folder)).role == "actor":
            logger.warning("--critic-load %s is an actor: the critic takes its backbone, its head is new", folder)
        else:
            logger.warning("--critic-load %s holds no value-pretraining contract: no proof", folder)
        return args
    stated = {name: getattr(args, name) for name in _HEAD if args.source_of(name) != "default"}
    objective, contract = check_online_contract(
        folder,
        expected_sha256=args.critic_value_pretrain_contract_sha256,
        expected_model_identity=args.hf_checkpoint,
        stated=stated,
    )
    check_critic_listing(folder, contract)
    check_published_together(folder, contract)
    if args.critic_value_eval_report is not None:
        check_passed_report(args.critic_value_eval_report, contract_digest=contract.sha256)
    args = args.replace(source="contract", **objective_args(objective))
    spoken_of = iteration_folder(folder, contract.completed_steps)
    check_identities(args.replace(source="contract", critic_load=str(spoken_of)))
    return args


def consumed_critic(args: Args) -> dict[str, Any] | None:
    """What the record of a fresh run says of the contract that its critic came with; None: it came without."""
    if args.critic_load is None or not contract_path(args.critic_load).exists():
        return None
    assert args.run_dir is not None
    report = args.critic_value_eval_report
    return describe_value_pretraining(args.run_dir, critic_load=args.critic_load, eval_report=report)


def check_identities(args: Args) -> None:
    """Compare what the checkpoints to load, the reference model's included, say of themselves with this run.

    Raises:
        ValueError: a folder holds no checkpoint, one that misses a file or has one of another size, or one of another
            model, role or head; names flag and file or field.
    """
    assert args.hf_checkpoint is not None
    try:
        architecture = Architecture.from_hf(args.hf_checkpoint)
    except ValueError as error:
        raise ValueError(f"--hf-checkpoint: {error}") from None

    # Of these the layout, the device and the number of the step may differ, so nothing compares them.
    unread: dict[str, Any] = {"iteration": 0, "dtype": "", "optimizer": None, "parallel": {}, "device": ""}
    actor = Identity(role="actor", architecture=architecture, value_head=None, **unread)
    checkpoints = {"load": (args.load, actor)}
    if args.has_critic:
        head = ValueHeadIdentity.from_args(args)
        critic = Identity(role="critic", architecture=architecture.untied(), value_head=head, **unread)
        checkpoints["critic_load"] = (args.critic_load, critic)
    if args.ref_load is not None and not (Path(args.ref_load) / "config.json").is_file():
        checkpoints["ref_load"] = (args.ref_load, actor)
    for field, (path, ours) in checkpoints.items():
        if path is None:
            continue
        try:
            folder = find_checkpoint(path)
            check_checkpoint_listing(folder)
            found = Identity.read(folder)
            bootstrap = field == "critic_load" and found.role == "actor"
            check_identity(found, ours, folder=folder, bootstrap=bootstrap)
        except (ValueError, FileNotFoundError) as error:
            flag = "--resume" if args.source_of(field) == "resume" else flag_of(field)
            raise ValueError(f"{flag}: {error}") from None
