"""`miles verify | doctor | report`: what one does with a run beside running it."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from miles.utils.strict_parser import StrictParser


def _verify(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    from miles.contracts import verify_command

    verify_command.add_arguments(parser)
    return verify_command.run


def _doctor(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="what to check for")

    def run(options: argparse.Namespace) -> int:
        from miles.utils.audit_utils import doctor

        return doctor.run(device=options.device)

    return run


def _report(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run folder")
    parser.add_argument("--out", type=Path, help="new file to write (default: report.html in the run folder)")
    parser.add_argument("--png", metavar="FILE", type=Path, help="new file for the learning curve as a picture, too")

    def run(options: argparse.Namespace) -> int:
        from miles.contracts.chain import RUN_RECORD_NAME, verify_chain
        from miles.reporting.report import learning_curve_png, write_report

        links = verify_chain(options.run_dir) if (options.run_dir / RUN_RECORD_NAME).is_file() else []
        print(write_report(options.run_dir, out=options.out, links=links))
        if options.png is not None:
            print(learning_curve_png(options.run_dir, options.png))
        return 0

    return run


COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], Callable[[argparse.Namespace], int]]]] = {
    "verify": ("check what a run, critic, report or manifest says of itself, link by link", _verify),
    "doctor": ("say what this installation and machine have and lack", _doctor),
    "report": ("draw a run folder as one HTML file", _report),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status; 2 for a user's mistake, told in one line."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="miles", allow_abbrev=False, description=__doc__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=StrictParser)
    for name, (summary, add_arguments) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        # Only the command asked for is imported.
        if name in words[:1]:
            command.set_defaults(run=add_arguments(command))
    options = parser.parse_args(words)
    try:
        return options.run(options)
    except (ValueError, OSError) as error:
        from miles.contracts.canonical import error_text

        named = {"--out": getattr(options, "out", None), "--png": getattr(options, "png", None)}
        print(f"miles {words[0]}: {error_text(error, named)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
