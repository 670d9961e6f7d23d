"""One line per log record, with its level, the time and the process it came from."""

import logging
import sys

from miles.config.args import Args

_QUIET = ("httpx", "httpcore", "urllib3", "asyncio", "filelock", "matplotlib", "ray", "megatron", "torch")


def configure_logger(args: Args, *, source: str) -> None:
    """Send log records of `args.log_level` and above to stderr, marked with `source` (for example 'train', 'actor3').

    Calling it again replaces the earlier set-up. Libraries speak from WARNING up, unless the level is DEBUG.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s %(levelname).1s [{source}] %(name)s: %(message)s", datefmt="%H:%M:%S")
    )
    logging.basicConfig(level=args.log_level, handlers=[handler], force=True)
    quiet = logging.NOTSET if args.log_level == "DEBUG" else max(logging.WARNING, logging.getLevelName(args.log_level))
    for name in _QUIET:
        logging.getLogger(name).setLevel(quiet)
