"""The command line: `parse_args()` turns flags and a YAML file into one checked `Args`.

pydantic-settings makes one flag of each field of `Args`; this module adds help by group, the nearest right name for a
wrong one, the source of each value, and the rules across fields.
"""

import argparse
import logging
import os
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ConfigDict
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsError

from miles.config.args import Args, Entry
from miles.config.files import config_yaml, user_settings
from miles.config.groups import GROUPS, fields_of, flag_of
from miles.config.rules import check, generated_saves
from miles.contracts.canonical import error_text
from miles.utils.strict_parser import StrictParser

logger = logging.getLogger(__name__)


_LISTS_OF_TEXT = {"sglang_extra_args", "eval_prompt_data", "eval_sampling", "allow_config_change", "fault_injection"}


class _CommandLine(Args, BaseSettings):  # pyright: ignore[reportIncompatibleVariableOverride]
    """`Args` seen by pydantic-settings, which derives the flags from it."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class _Parser(StrictParser):
    """A parser with help by group."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, usage="%(prog)s [--config FILE] [flags]")
        self._group_of: dict[str, argparse._ArgumentGroup] = {}
        self.text_lists: dict[str, list[str]] = {}
        for group in GROUPS:
            section = self.add_argument_group(group.title)
            self._group_of |= dict.fromkeys(fields_of(group), section)

    def add_field(self, *flags: str, **options: Any) -> argparse.Action:
        """Add a field's flag to the help section of its group."""
        options["help"] = options["help"].replace(" (default: null)", "")
        return self._group_of[options["dest"]].add_argument(*flags, **options)

    def parse_strictly(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse; every word must belong to a flag, and nothing that is given is dropped without a word."""
        namespace, rest = self.parse_known_args(argv)
        self._tell_repeated(argv)
        if rest:
            self.error(
                f"unexpected argument {rest[0]!r}: a value must follow its flag (booleans are --FLAG or --no-FLAG)"
            )
        # Taken past pydantic-settings, which would split each item at its commas.
        self.text_lists = {name: value for name, value in vars(namespace).items() if name in _LISTS_OF_TEXT}
        for name in self.text_lists:
            delattr(namespace, name)
        return namespace

    def _tell_repeated(self, argv: Sequence[str]) -> None:
        """Refuse a file or a list that is given twice; of other flags the last one counts, as scripts rely on."""
        given: dict[str, list[str]] = {}
        for word in argv:
            action = self._option_string_actions.get(word.split("=", 1)[0])
            if action is not None and not isinstance(action, argparse._AppendAction):
                given.setdefault(action.dest, []).append(word)
        for dest, words in given.items():
            if len(words) == 1:
                continue
            flag = words[-1].split("=", 1)[0]
            if dest == "config":
                self.error(f"{flag} is given twice; put the settings into one file, or give some as flags")
            if self._option_string_actions[flag].nargs == "*":
                self.error(f"{flag} is given twice; give all its values after one")
            print(f"{self.prog}: warning: {flag} is given {len(words)} times, the last one counts", file=sys.stderr)


def parse_args(argv: Sequence[str] | None = None, entry: Entry | None = None) -> Args:
    """Parse a command line, put it on top of its --config file, fill what derives, and check every rule.

    Args:
        argv: words of the command line without the program (default: those of this process).
        entry: which program's rules apply (default: 'train_value' where --value-pretrain-manifest is set).

    Returns:
        The frozen settings. In value pretraining the objective and, where unset, num_rollout come from the manifest.

    A user's mistake ends the process with status 2 after one line per mistake on stderr; --help and --print-config end
    it with status 0.
    """
    program = Path(sys.argv[0]).name or "miles"
    parser = _Parser(program, "Flags go on top of the YAML file given with --config.")
    try:
        os.getcwd()
    except FileNotFoundError:
        parser.error("the folder that this was started in is gone; change into one that exists")
    try:
        args, print_config = _settings(parser, list(sys.argv[1:] if argv is None else argv), entry)
        entry = entry or _entry_of(args)
        try:
            args = _with_manifest(args) if entry == "train_value" else args
            warnings = check(args, entry=entry)
        except (ValueError, OSError) as error:
            # A path below a folder that may not be looked into, or with a name too long, belongs to a flag.
            reason = error_text(error, {flag_of(name): given for name, given in args if isinstance(given, str)})
            if not print_config:
                raise ValueError(reason) from None
            warnings = [f"a run would be refused: {line}" for line in reason.splitlines()]
    except (ValueError, OSError) as error:
        parser.error(error_text(error))
    for warning in warnings:
        print(f"{program}: warning: {warning}", file=sys.stderr)
    if print_config:
        sys.stdout.write(config_yaml(args))
        raise SystemExit(0)
    return args


def _settings(parser: _Parser, argv: list[str], entry: Entry | None) -> tuple[Args, bool]:
    try:
        command_line = CliSettingsSource(
            _CommandLine,
            cli_parse_args=argv,
            root_parser=parser,
            parse_args_method=_Parser.parse_strictly,
            add_argument_method=lambda target, *flags, **options: target.add_field(*flags, **options),
            cli_kebab_case=True,
            cli_implicit_flags=True,
            cli_hide_none_type=True,
        )
        flags: dict[str, Any] = {**command_line(), **parser.text_lists}
    except SettingsError as error:
        raise ValueError(textwrap.shorten(str(error), 300)) from None
    config = flags.get("config")
    from_file, where, notes = user_settings(config) if config else ({}, {}, [])
    for note in notes:
        print(f"{parser.prog}: warning: {note}", file=sys.stderr)
    sources = dict.fromkeys(from_file, f"file:{config}") | dict.fromkeys(flags, "flag")
    values = from_file | flags
    args = Args.from_values(values, sources, where={name: text for name, text in where.items() if name not in flags})
    if args.run_dir is None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        name = entry or _entry_of(args)
        args = args.replace(source="generated", run_dir=f"runs/{name}-{stamp}-{os.getpid()}")
    if args.save is None and (entry or _entry_of(args)) == "train":
        assert args.run_dir is not None
        folders = generated_saves(args.run_dir)
        if args.critic_save is not None:
            del folders["critic_save"]
        args = args.replace(source="generated", **folders)
    return args, args.print_config


def _entry_of(args: Args) -> Entry:
    return "train_value" if args.value_pretrain_manifest is not None else "train"


def _with_manifest(args: Args) -> Args:
    """Take the objective, and where it is unset the number of steps, from the value-pretraining manifest."""
    if args.value_pretrain_manifest is None:
        return args
    # The manifest's readers stand above this module in the house; only this program start needs them.
    from miles.contracts.value_schema import load_value_pretrain_manifest
    from miles.value_pretraining import objective_args, value_pretrain_num_steps

    try:
        manifest = load_value_pretrain_manifest(args.value_pretrain_manifest, args.value_pretrain_manifest_sha256)
    except OSError as error:
        raise ValueError(f"--value-pretrain-manifest: {error}") from None
    stated = objective_args(manifest.objective)
    stated["value_reward_range"] = tuple(stated["value_reward_range"])
    for field, value in stated.items():
        given = getattr(args, field)
        if args.source_of(field) != "default" and given != value:
            raise ValueError(f"{flag_of(field)} is {given}, the objective of {manifest.path} has {value}")
    # What follows from the rollouts of a shared file is no batch size of value pretraining; the rules say so.
    planned = not args.source_of("global_batch_size").startswith("derived:")
    if planned and args.global_batch_size is not None and not args.value_pretrain_eval_only:
        steps = value_pretrain_num_steps(
            num_samples=manifest.train.num_samples,
            global_batch_size=args.global_batch_size,
            epochs=args.value_pretrain_epochs,
        )
        if args.num_rollout not in (None, steps):
            raise ValueError(f"--num-rollout {args.num_rollout} differs from the {steps} steps of the batch plan")
        stated["num_rollout"] = steps
    return args.replace(source=f"manifest:{args.value_pretrain_manifest}", **stated)
