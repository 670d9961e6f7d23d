"""Arithmetic on the parallel sizes, without Megatron."""

from miles.config.args import Args


def compute_megatron_world_size_except_dp(args: Args) -> int:
    """Ranks of one model replica: tensor x pipeline x context, as `args` gives them."""
    return args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
