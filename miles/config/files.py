"""Reading a YAML file of settings, strictly, and writing one back with the source of every value."""

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from miles.config.args import Args, nearest
from miles.config.groups import GROUPS, fields_of, flag_of
from miles.config.rules import generated_saves

NOT_IN_FILES = frozenset({"config", "print_config"})
"""Fields that steer the parse itself and so have no place in a file."""


_OF_ONE_START = frozenset(
    {"resume", "allow_config_change", "fault_injection", "canary_one_step", "value_pretrain_canary_one_step"}
)
"""What a flag says of the start that it is given to, and not of the run."""

_MARKED = re.compile(r"^(\w+): .*  # (\S+)$", re.MULTILINE)
"""A setting as `config_yaml` writes it, and the source it came from."""


_NUMBER_OF_YAML_1_1 = re.compile(r"[-+]?(0[0-7_]*[1-7][0-7_]*|[1-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
"""What people write as ten or as a time, and YAML 1.1 takes for eight or for seconds."""


class _StrictLoader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice in one mapping, and says where a value stands that is none."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            return super().construct_object(node, deep)
        if node.style is None and _NUMBER_OF_YAML_1_1.fullmatch(node.value):
            raise yaml.MarkedYAMLError(
                problem=f"{node.value!r} is read as a number of base 8 or 60: write decimals, or text in quotes",
                problem_mark=node.start_mark,
            )
        try:
            return super().construct_object(node, deep)
        except (ValueError, AttributeError, KeyError, OverflowError) as error:
            # A date that is none, or text behind a tag such as !!int.
            kind = node.tag.rpartition(":")[2]
            raise yaml.MarkedYAMLError(problem=f"{node.value!r} is no {kind}", problem_mark=node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, Hashable):
                raise yaml.MarkedYAMLError(problem="a key is a list or a mapping", problem_mark=key_node.start_mark)
            if key in seen:
                raise ValueError(
                    f"{node.start_mark.name}:{line}: key {key!r} is given twice (first in line {seen[key]})"
                )
            seen[key] = line
        return super().construct_mapping(node, deep)


_FIRST_LINE, _LAST_LINE = "# Every setting of a run, with its source. The last line is: # end", "# end"


def read_config_file(path: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Settings of a YAML file, and for each of them where it stands ('FILE:LINE: KEY').

    Raises:
        ValueError: the file cannot be read, is no mapping of settings, repeats a key or holds an unknown one.
    """
    return _settings_in(_read(path), path)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.reason
        raise ValueError(f"--config {path}: cannot be read: {reason}") from None


def _settings_in(text: str, path: str) -> tuple[dict[str, Any], dict[str, str]]:
    lines_of_text = text.removeprefix("\ufeff").splitlines()
    if lines_of_text[:1] == [_FIRST_LINE] and _LAST_LINE not in lines_of_text:
        raise ValueError(f"{path}: is cut off: it has no line {_LAST_LINE!r}")
    try:
        loader = _StrictLoader(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ValueError(f"{path}:{line}: not valid YAML: {error.reason}: {chr(int(error.character))!r}") from None
    loader.name = path
    try:
        node = loader.get_single_node()
        if node is None:
            return {}, {}
        if not isinstance(node, yaml.MappingNode):
            raise ValueError(f"{path}:1: expected a mapping of settings (name: value)")
        values = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ValueError(f"{path}:{line}: not valid YAML: {error.problem or error.context}") from None
    except RecursionError:
        raise ValueError(f"{path}: not valid YAML: nested too deeply") from None
    finally:
        loader.dispose()
    lines = {str(key_node.value): key_node.start_mark.line + 1 for key_node, _ in node.value}
    known = Args.model_fields.keys() - NOT_IN_FILES
    for key in values:
        if key in NOT_IN_FILES:
            raise ValueError(f"{path}:{lines[key]}: {key!r} is for the command line only ({flag_of(key)})")
        if key not in known:
            raise ValueError(f"{path}:{lines.get(str(key), 1)}: unknown key {key!r}{nearest(str(key), known)}")
    return values, {key: f"{path}:{lines[key]}: {key}" for key in values}


def read_settings(path: str | Path) -> Args:
    """The settings of a YAML file, for a program whose other flags are its own; no rule across fields is checked.

    Raises:
        ValueError: as `read_config_file`, or a value has the wrong type.
    """
    values, where = read_config_file(str(path))
    return Args.from_values(values, dict.fromkeys(values, f"file:{path}"), where=where)


def user_settings(path: str) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """As `read_config_file`, without what a resolved file holds though nobody said it; and warnings.

    These lines `config_yaml` marks: a "default", what was "derived" from other settings of the file, a "generated"
    folder to save to; all only where nobody has edited them since. Beside flags that change what they came from they
    would stay what they were. Nor does a flag count again that was for one start alone, such as a change it allowed.
    A derived line that does not follow any more is warned of: it was edited, or only what it came from was.

    Raises:
        ValueError: as `read_config_file`, or a value has the wrong type.
    """
    text = _read(path)
    values, where = _settings_in(text, path)
    marks = dict(_MARKED.findall(text))
    if not marks:
        return values, where, []
    args = Args.from_values(values, dict.fromkeys(values, f"file:{path}"), where=where)
    # Whichever run folder they lie in: that may have been edited since.
    saves = {name: tuple(Path(folder).parts) for name, folder in generated_saves("").items()}

    def follows(name: str) -> bool:
        mark = marks.get(name, "")
        if mark == "generated":
            return name in saves and Path(values[name]).parts[-len(saves[name]) :] == saves[name]
        if mark == "flag":
            return name in _OF_ONE_START
        if mark.startswith("recipe:"):
            return True
        if mark.startswith("manifest:"):
            # The objective is the manifest's own word, which is compared; the steps follow from epochs and batches.
            return name == "num_rollout"
        return (mark == "default" or mark.startswith("derived:")) and not args.is_user_set(name)

    given = {name: value for name, value in values.items() if not follows(name)}
    derived = {name: marks.get(name, "").partition("derived:")[2] for name in given}
    notes = [
        f"{where[name]} stays {given[name]}: it does not follow from {origin}, though its comment says so; without "
        "the line it would"
        for name, origin in derived.items()
        if origin
    ]
    return given, {name: where[name] for name in given}, notes


def config_yaml(args: Args) -> str:
    """Every setting as YAML, grouped, with its source as a comment; the text can be given to --config again."""
    blocks = []
    for group in GROUPS:
        rows = []
        for name in fields_of(group):
            if name in NOT_IN_FILES:
                continue
            value = args.model_dump(mode="json", include={name})[name]
            # A lone scalar is followed by YAML's end-of-document mark.
            text = yaml.safe_dump(value, default_flow_style=True, width=1_000_000).removesuffix("...\n").strip()
            rows.append((f"{name}: {text}", args.source_of(name)))
        width = max(len(left) for left, _ in rows)
        blocks.append("\n".join([f"# {group.title}", *(f"{left:<{width}}  # {source}" for left, source in rows)]))
    return "\n\n".join([_FIRST_LINE, *blocks, _LAST_LINE]) + "\n"
