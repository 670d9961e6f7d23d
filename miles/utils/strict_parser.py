"""A command line that names an unknown flag, and the nearest right one, before anything else."""

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

_FLAG = re.compile(r"--?[A-Za-z][\w-]*")
"""A word that can only be meant as a flag; negative numbers and texts with blanks are values."""


class StrictParser(argparse.ArgumentParser):
    """argparse without abbreviations, with one-line errors.

    An unknown flag is told first: argparse would say that a required one is missing, which follows from it.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        prefixed = "".join(f"{self.prog}: error: {line}\n" for line in message.splitlines())
        self.exit(2, prefixed)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        for word in words[: words.index("--")] if "--" in words else words:
            flag = word.split("=", 1)[0]
            if _FLAG.fullmatch(flag) and flag not in self._option_string_actions:
                # The typed settings take a moment to import: only a mistake waits for them.
                from miles.config.args import nearest

                self.error(f"unknown flag {flag}{nearest(flag, self._option_string_actions)}")
        return super().parse_known_args(words, namespace)
