"""Offline value pretraining: train a critic on recorded trajectories, or put one through the gate."""

from miles.utils.audit_utils.interrupts import end_in_one_line

if __name__ == "__main__":
    end_in_one_line("train_value.py")

from miles.backends.megatron.checkpoint_identity import Identity, find_checkpoint
from miles.config import Args
from miles.config.hf_folder import read_model_config
from miles.contracts.artifact import check_checkpoint_listing
from miles.data.value_leak import refuse_leaking_prompts
from miles.utils.arguments import parse_args
from miles.utils.logging_utils import configure_logger
from miles.utils.megatron_args_utils import compute_megatron_world_size_except_dp
from miles.utils.tracking_utils.run_folder import (
    claim_run_folder,
    create_run_folder,
    record_start,
    update_run_json,
)
from miles.utils.tracking_utils.tracking import init_tracking
from miles.value_pretraining import (
    ValuePretrainPlan,
    check_critic_listing,
    check_loaded_iterations,
    check_some_token_ids,
    check_token_budget,
    objective_args,
    prepare_value_pretraining,
)


def check_seed_of_critic(args: Args) -> None:
    """Look at the checkpoint that a fresh critic starts from, if any.

    Raises:
        ValueError: there is none in the folder, a file of it is missing or cut off, or it is of a critic in training,
            without a contract.
    """
    flag = "--load" if args.critic_load is None else "--critic-load"
    folder = args.for_role("critic").load
    if folder is None:
        return
    try:
        checkpoint = find_checkpoint(folder)
        check_checkpoint_listing(checkpoint)
        found = Identity.read(checkpoint)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"{flag} {error}") from None
    if found.role == "critic":
        check_loaded_iterations([found.iteration], resume=None)


async def main(args: Args, plan: ValuePretrainPlan) -> None:
    """Everything that needs a device: the critic group alone, no actor, no rollout engine."""
    from miles.ray.offline import evaluate, train
    from miles.ray.placement_group import create_value_pretraining_group

    tracker = init_tracking(args, resume_step=plan.resume_after + 1)
    group = create_value_pretraining_group(args)
    loaded = check_loaded_iterations(await group.init(), resume=plan.resume)
    # What an earlier start made is not what this one will have made.
    facts = {"value_data": plan.data_record(), "value_pretraining": None}
    update_run_json(record_start(args, entry="train_value"), **facts)
    if args.value_pretrain_eval_only:
        await evaluate(args, plan, group, loaded, tracker)
    else:
        await train(args, plan, group, tracker)


if __name__ == "__main__":
    settings = parse_args(entry="train_value")
    configure_logger(settings, source="train_value")
    try:
        value_plan = prepare_value_pretraining(
            settings, model_parallel_size=compute_megatron_world_size_except_dp(settings.for_role("critic"))
        )
        claim_run_folder(settings, entry="train_value")
        if value_plan.resume is None:
            check_seed_of_critic(settings)
        else:
            assert settings.critic_load is not None
            check_critic_listing(settings.critic_load, value_plan.resume)
        check_token_budget(value_plan.dataset, settings)
        if settings.value_pretrain_eval_only:
            judged = settings.value_pretrain_eval_split == "heldout"
        else:
            # What no gate could judge afterwards is not worth training.
            judged = value_plan.manifest.heldout is not None and value_plan.resume is None
        if judged:
            refuse_leaking_prompts(value_plan.manifest)
        assert settings.hf_checkpoint is not None
        check_some_token_ids(
            value_plan.dataset,
            vocab_size=read_model_config(settings.hf_checkpoint)["vocab_size"],
            model=settings.hf_checkpoint,
        )
        settings = settings.replace(source="manifest", **objective_args(value_plan.manifest.objective))
        # Ray comes only now: everything above is refused within a second or two.
        from miles.ray.cluster import check_before_ray_starts
        from miles.ray.program import run_program

        check_before_ray_starts(settings, entry="train_value")
        create_run_folder(settings, entry="train_value")
    except (ValueError, OSError) as mistake:
        raise SystemExit(f"train_value.py: {mistake}") from None
    run_program("train_value.py", main(settings, value_plan))
