"""From settings to the actor's loss. Imports no Megatron: the driver needs parts of it too."""

from __future__ import annotations

import math
from typing import Any

from miles.algorithms.corrections import Correction, icepop, tis
from miles.algorithms.kl import MAX_LOG_RATIO
from miles.algorithms.policy_losses import PolicyLoss

# Ratios are clamped here, so as a bound it is none.
_NO_BOUND = math.exp(MAX_LOG_RATIO)


def correction_of(args: Any) -> Correction | None:
    """The weights for tokens that the engine sampled from another distribution than the old policy's, if any.

    Decoupled PPO brings its own (`PolicyLoss.effective_correction`), and no settings' correction goes with it.
    """
    if args.ratio_correction == "none":
        return None
    if args.ratio_correction == "tis":
        return tis(low=args.tis_clip_low, high=args.tis_clip)
    if args.ratio_correction == "icepop":
        return icepop(low=args.icepop_low, high=args.icepop_high)
    rejection: dict[str, Any] = {}
    if args.mis_reject_low is not None or args.mis_reject_high is not None:
        rejection = {
            # Unless asked for, what is rejected is a whole sequence, whatever the level of the weights.
            "reject_level": args.mis_reject_level or ("sequence" if args.mis_level == "token" else args.mis_level),
            "reject_low": 0.0 if args.mis_reject_low is None else args.mis_reject_low,
            "reject_high": _NO_BOUND if args.mis_reject_high is None else args.mis_reject_high,
        }
    return Correction(
        level=args.mis_level,
        mode=args.mis_mode,
        low=args.mis_low,
        high=args.mis_high,
        veto=args.mis_veto or None,
        batch_normalize=args.mis_batch_normalize,
        **rejection,
    )


def policy_loss_of(args: Any) -> PolicyLoss:
    """The loss of each token.

    Raises:
        ValueError: Settings that do not go together.
    """
    return PolicyLoss(
        objective=args.policy_objective,
        eps_clip=args.eps_clip,
        eps_clip_high=args.eps_clip_high,
        dual_clip=args.eps_clip_c,
        ratio_grad=args.ratio_grad,
        correction=correction_of(args),
        opsm_delta=args.opsm_delta if args.use_opsm else None,
        entropy_coef=args.entropy_coef,
        kl_loss_coef=args.kl_loss_coef if args.use_kl_loss else 0.0,
        kl_loss_type="unbiased" if args.use_unbiased_kl else args.kl_loss_type,
    )


def constant_length(args: Any) -> float | None:
    """The constant that "seq-mean-token-sum-norm" divides by."""
    return args.rollout_max_response_len if args.loss_agg_length is None else args.loss_agg_length
