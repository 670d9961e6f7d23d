#!/usr/bin/env python
"""Build a value data set (manifest, train and held-out rows, conversion report) from saved rollouts.

    python tools/build_value_dataset.py --rollouts RUN_FOLDER --out value_data --heldout-fraction 0.2

Held out by prompt, never by sample. Returns are Monte-Carlo returns of the rewards. Nothing is overwritten.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from miles.contracts.canonical import error_text
from miles.contracts.value_schema import LOSS_TYPES, TARGET_TYPES, ValueObjective
from miles.data.value_rows import ConversionOptions, build_value_dataset
from miles.utils.strict_parser import StrictParser


def build_parser() -> StrictParser:
    """Return the command line of this tool."""
    parser = StrictParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rollouts", nargs="+", required=True, metavar="PATH", help="JSONL files, folders, run folders"
    )
    parser.add_argument("--out", required=True, metavar="FOLDER", help="new folder for the data set")
    held = parser.add_mutually_exclusive_group()
    held.add_argument("--heldout-fraction", type=float, default=0.2, help="part of the distinct prompts (default 0.2)")
    held.add_argument("--heldout-rollouts", nargs="+", default=[], metavar="PATH", help="held-out rollouts, apart")
    parser.add_argument("--gamma", type=float, default=1.0, help="discount per trainable token (default 1.0)")
    parser.add_argument("--seed", type=int, default=1234, help="seed of the split and the label mix (default 1234)")
    parser.add_argument(
        "--label-mix",
        choices=("natural", "balanced"),
        default="natural",
        help="balanced: as many rows of each reward as of the rarest, in each split (default natural)",
    )
    parser.add_argument(
        "--rows-per-label",
        type=int,
        nargs=2,
        metavar=("TRAIN", "HELDOUT"),
        help="balanced: up to so many rows of each reward instead; rarer rewards keep all",
    )
    parser.add_argument("--max-tokens", type=int, help="keep the last tokens of longer rows")
    parser.add_argument("--strict", action="store_true", help="refuse where a completed row would be left out")
    default = ValueObjective()
    parser.add_argument("--value-loss-type", choices=LOSS_TYPES, default=default.loss_type)
    parser.add_argument("--value-num-bins", type=int, default=default.num_bins)
    parser.add_argument("--value-reward-range", type=float, nargs=2, default=[0.0, 1.0], metavar=("LOW", "HIGH"))
    parser.add_argument("--value-target-type", choices=TARGET_TYPES, default=default.target_type)
    parser.add_argument("--hl-gauss-sigma-ratio", type=float, default=default.hl_gauss_sigma_ratio)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Build the data set and print what was made; one line and exit code 1 when it is refused."""
    parser = build_parser()
    ns = parser.parse_args(argv)
    if ns.value_loss_type != "classification":
        for field in ("value_num_bins", "value_target_type", "hl_gauss_sigma_ratio"):
            if getattr(ns, field) != parser.get_default(field):
                parser.error(f"--{field.replace('_', '-')} has no effect with --value-loss-type {ns.value_loss_type}")
    try:
        report = build_value_dataset(
            ns.rollouts,
            ns.out,
            objective=ValueObjective(
                loss_type=ns.value_loss_type,
                num_bins=ns.value_num_bins,
                reward_low=ns.value_reward_range[0],
                reward_high=ns.value_reward_range[1],
                target_type=ns.value_target_type,
                hl_gauss_sigma_ratio=ns.hl_gauss_sigma_ratio,
            ),
            options=ConversionOptions(
                gamma=ns.gamma,
                heldout_fraction=ns.heldout_fraction,
                seed=ns.seed,
                label_mix=ns.label_mix,
                rows_per_label=None if ns.rows_per_label is None else (ns.rows_per_label[0], ns.rows_per_label[1]),
                max_tokens=ns.max_tokens,
                strict=ns.strict,
            ),
            heldout_rollouts=ns.heldout_rollouts,
        )
    except (ValueError, OSError) as error:
        print(f"build_value_dataset: {error_text(error, {'--out': ns.out})}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("build_value_dataset: interrupted, nothing was written", file=sys.stderr)
        return 130
    print(f"rollouts read: {report['rows_read']}, kept: {report['rows_kept']}")
    for reason, count in report["rows_dropped"].items():
        print(f"  left out: {count:6d}  {reason}  (first: {report['dropped_examples'][reason][0]})")
    if ns.rows_per_label is None and 2 * report["rows_dropped"].get("label_mix", 0) > report["rows_read"]:
        print("  the rarest reward sets the number of all; --rows-per-label takes up to so many of each instead")
    for name, part in report["splits"].items():
        rewards = ", ".join(f"{float(label):g}: {count}" for label, count in list(part["rewards"].items())[:6])
        print(
            f"  {name}: {part['rows']} rows of {part['prompts']} prompts, {part['targets']} targets, rewards {rewards}"
        )
        if part["windowed"]:
            cut = part["window_dropped"]
            print(f"    {part['windowed']} rows shortened: {cut['tokens']} tokens, {cut['targets']} targets left out")
    for warning in report["warnings"]:
        print(f"build_value_dataset: warning: {warning}", file=sys.stderr)
    print(f"manifest: {report['manifest_path']}")
    print(f"manifest sha256: {report['manifest_sha256']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
