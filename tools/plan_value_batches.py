#!/usr/bin/env python
"""Plan value-pretraining batches that use every row exactly once per epoch: data-parallel size, batch size, steps.

    python tools/plan_value_batches.py --manifest value_data/manifest.json --num-gpus 8 --out plan.json

`train_value.py` drops the rows that fill no whole batch; with the batch size planned here there are none. The plan is
printed, and written where --out says; nothing is overwritten.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from miles.contracts.canonical import canonical_json_bytes, error_text, require_int
from miles.contracts.publish import publish_bytes
from miles.contracts.value_schema import load_value_pretrain_manifest
from miles.utils.strict_parser import StrictParser

PLAN_SCHEMA = "miles.tbench21-value-pretrain-plan.v1"
DEFAULT_MAX_GLOBAL_BATCH_SIZE = 64


def plan_value_batches(
    num_samples: int,
    *,
    num_gpus: int,
    max_global_batch_size: int = DEFAULT_MAX_GLOBAL_BATCH_SIZE,
    model_parallel_size: int = 1,
) -> dict[str, Any]:
    """Return the exact-coverage plan of formulas A11.

    data_parallel_size is the largest divisor of the number of rows that the devices and the batch limit allow;
    global_batch_size the largest multiple of it that divides the number of rows and keeps the limit.

    Args:
        num_gpus: devices for the critic; each of `model_parallel_size` of them hold one copy.

    Raises:
        ValueError: an argument is not a positive integer, or the devices hold no whole copy.
    """
    for field, value in (
        ("number of rows", num_samples),
        ("--num-gpus", num_gpus),
        ("--max-global-batch-size", max_global_batch_size),
        ("--model-parallel-size", model_parallel_size),
    ):
        require_int(value, field=field, minimum=1)
    copies = num_gpus // model_parallel_size
    if copies == 0:
        raise ValueError(f"--num-gpus {num_gpus} is less than --model-parallel-size {model_parallel_size}")
    limit = min(num_samples, max_global_batch_size)
    dp_size = max(d for d in range(1, min(limit, copies) + 1) if num_samples % d == 0)
    batch_size = max(g for g in range(dp_size, limit + 1, dp_size) if num_samples % g == 0)
    return {
        "schema": PLAN_SCHEMA,
        "num_samples": num_samples,
        "num_gpus": num_gpus,
        "model_parallel_size": model_parallel_size,
        "max_global_batch_size": max_global_batch_size,
        "data_parallel_size": dp_size,
        "global_batch_size": batch_size,
        "steps_per_epoch": num_samples // batch_size,
    }


def build_parser() -> StrictParser:
    """Return the command line of this tool."""
    parser = StrictParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rows = parser.add_mutually_exclusive_group(required=True)
    rows.add_argument("--manifest", metavar="FILE", help="take the number of rows from a manifest's train split")
    rows.add_argument("--num-samples", type=int, metavar="N", help="number of rows")
    parser.add_argument("--num-gpus", type=int, required=True, metavar="N", help="devices for the critic")
    parser.add_argument("--model-parallel-size", type=int, default=1, metavar="N", help="devices of one copy (1)")
    parser.add_argument("--max-global-batch-size", type=int, default=DEFAULT_MAX_GLOBAL_BATCH_SIZE, metavar="N")
    parser.add_argument("--out", metavar="FILE", help="new file for the plan (canonical JSON, mode 0600)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan and the flags that follow from it; one line and exit code 1 when there is none."""
    ns = build_parser().parse_args(argv)
    try:
        manifest = None if ns.manifest is None else load_value_pretrain_manifest(ns.manifest)
        plan = plan_value_batches(
            ns.num_samples if manifest is None else manifest.train.num_samples,
            num_gpus=ns.num_gpus,
            max_global_batch_size=ns.max_global_batch_size,
            model_parallel_size=ns.model_parallel_size,
        )
        if manifest is not None:
            plan |= {"source_manifest_sha256": manifest.sha256, "train_dataset_sha256": manifest.train.sha256}
        if ns.out is not None:
            publish_bytes(ns.out, canonical_json_bytes(plan), replace=False, mode=0o600)
    except (ValueError, OSError) as error:
        named = {"--manifest": ns.manifest, "--out": ns.out}
        print(f"plan_value_batches: {error_text(error, named)}", file=sys.stderr)
        return 1
    used, rows = plan["data_parallel_size"] * ns.model_parallel_size, plan["num_samples"]
    print(f"{rows} rows = {plan['steps_per_epoch']} steps of {plan['global_batch_size']}, nothing dropped")
    print(f"flags: --global-batch-size {plan['global_batch_size']} --critic-num-gpus-per-node {used}")
    if used < ns.num_gpus:
        over = ns.num_gpus % ns.model_parallel_size
        reasons = [f"{over} make no whole copy of {ns.model_parallel_size}"] if over else []
        if used + over < ns.num_gpus:
            limit = f"{rows} rows in batches of up to {plan['max_global_batch_size']}"
            reasons.append(f"no larger divisor fits {limit}")
        print(f"{ns.num_gpus - used} of {ns.num_gpus} devices stay idle: {'; '.join(reasons)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
