#!/usr/bin/env python
"""Draw a value evaluation report as one HTML file that opens offline.

    python tools/render_value_report.py report.json --tokenizer HF_MODEL_FOLDER --out report.html

Explained variance per batch with the gate's line, calibration, value against position in the response, and the
trajectories with the largest residuals; with a tokenizer their tokens are read as text. The report's figures are
recomputed first: one that contradicts itself is refused. Nothing is overwritten.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from miles.contracts.canonical import error_text
from miles.reporting.value_page import Decode, write_value_page
from miles.utils.strict_parser import StrictParser

# So many tokens before one decide how it is written; a character may take several tokens.
_CONTEXT = 8


def load_decoder(folder: str) -> Decode:
    """Return a function from token ids to the text of each, for a Hugging Face folder with a tokenizer.json.

    Raises:
        ValueError: the folder holds no tokenizer.
    """
    from tokenizers import Tokenizer

    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"--tokenizer {folder}: holds no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        raise ValueError(f"--tokenizer {path}: {error}") from None

    def text(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    def decode(ids: Sequence[int]) -> list[str]:
        pieces, pending = [], 0
        for i in range(len(ids)):
            context = ids[max(0, i - pending - _CONTEXT) : i - pending]
            before, now = text(context), text(ids[max(0, i - pending - _CONTEXT) : i + 1])
            # An unfinished character reads as a replacement; its bytes show with the token that ends it.
            if now.endswith("\ufffd") and pending < 4:
                pieces.append("")
                pending += 1
            else:
                pieces.append(now[len(before) :])
                pending = 0
        return pieces

    return decode


def build_parser() -> StrictParser:
    """Return the command line of this tool."""
    parser = StrictParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", metavar="REPORT", help="evaluation report (--value-pretrain-eval-report)")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="Hugging Face folder with the model's tokenizer")
    parser.add_argument("--out", metavar="FILE", help="new file to write (default: the report's name with .html)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the report and print where it is; one line and exit code 1 when it cannot be."""
    ns = build_parser().parse_args(argv)
    try:
        decode = None if ns.tokenizer is None else load_decoder(ns.tokenizer)
        print(write_value_page(ns.report, ns.out, decode=decode))
    except (ValueError, OSError) as error:
        out = Path(ns.report).with_suffix(".html") if ns.out is None else ns.out
        print(f"render_value_report: {error_text(error, {'--out': out, 'REPORT': ns.report})}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
