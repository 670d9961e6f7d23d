"""The arrows of the house: a room imports only from rooms below it, and certain libraries only in certain rooms.

Imports inside functions count too. Reads the source with `ast`; imports nothing.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

Room = tuple[str, ...]

FLOORS: list[list[Room]] = [
    [("miles.contracts",)],
    [("miles.config",)],
    [("miles.utils",)],
    [("miles.algorithms",)],
    [("miles.data",)],
    [("miles.value_pretraining", "miles.value_evaluation")],
    [("miles.backends.weight_group", "miles.backends.weight_checksums")],
    [("miles.backends.megatron",), ("miles.backends.sglang",), ("miles.reporting",)],
    [("miles.rollout",)],
    [("miles.ray",)],
    [("miles.cli",)],
]
"""Bottom first; a room is the modules that may import each other. Rooms of one floor do not know each other.

`contracts` imports nothing of ours, so it lies at the very bottom: everybody publishes files with it.
"""

ALLOWED_UPWARD = {
    # The parse takes the steps and the objective of a value-pretraining run from its manifest.
    ("miles/utils/arguments.py", "miles.value_pretraining"),
}

ONLY_IN: dict[str, tuple[str, ...]] = {
    "megatron": ("miles/backends/megatron/",),
    "transformer_engine": ("miles/backends/megatron/",),
    "ray": ("miles/ray/",),
    "sglang": ("miles/backends/sglang/",),
    "triton": ("miles/backends/sglang/",),
    "torchvision": ("miles/backends/sglang/",),
    "wandb": ("miles/utils/tracking_utils/",),
}
"""Libraries that one room alone imports. Entry programs and examples start from rooms, not from these."""

NOTHING_HEAVY = ("torch", "ray", "transformers", "numpy", "megatron", "sglang")
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "miles/config/": NOTHING_HEAVY,
    "miles/utils/arguments.py": NOTHING_HEAVY,
    "miles/utils/megatron_args_utils.py": NOTHING_HEAVY,
    "miles/contracts/": NOTHING_HEAVY,
    "miles/data/": ("ray", "megatron", "sglang"),
    "miles/reporting/": ("torch", "ray", "megatron", "sglang"),
    "miles/value_pretraining.py": NOTHING_HEAVY,
}


def source_files() -> list[Path]:
    folders = [ROOT / "miles", ROOT / "tools", ROOT / "examples"]
    found = [path for folder in folders for path in folder.rglob("*.py")] + list(ROOT.glob("train*.py"))
    # A stand-in bears the name of the library it stands for.
    return sorted(path for path in found if "cpu_stand_ins" not in path.parts and ".venv" not in path.parts)


@cache
def imports_of(path: Path) -> list[tuple[int, str]]:
    """(line, dotted module) of every import; `from miles import data` counts as miles.data."""
    found: list[tuple[int, str]] = []
    package = ".".join(path.relative_to(ROOT).with_suffix("").parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def inside(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


def room_of(module: str) -> tuple[int, Room] | None:
    """(floor, room) of a module, None for one that belongs to no room."""
    for floor, rooms in enumerate(FLOORS):
        for room in rooms:
            if any(inside(module, part) for part in room):
                return floor, room
    return None


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_every_module_stands_in_a_room() -> None:
    modules = [module_of(path) for path in source_files() if relative(path).startswith("miles/")]
    assert [m for m in modules if room_of(m) is None and m not in ("miles", "miles.backends")] == []


def test_a_room_imports_only_from_rooms_below() -> None:
    broken = []
    for path in source_files():
        here = room_of(module_of(path))
        if here is None:
            continue
        for line, module in imports_of(path):
            there = room_of(module)
            if there is None or there[1] == here[1] or there[0] < here[0]:
                continue
            if not any(relative(path) == file and inside(module, room) for file, room in ALLOWED_UPWARD):
                broken.append(f"{relative(path)}:{line}: imports {module}")
    assert broken == []


def test_a_library_of_one_room_is_imported_nowhere_else() -> None:
    broken = [
        f"{relative(path)}:{line}: {module} belongs to {' or '.join(rooms)}"
        for path in source_files()
        for line, module in imports_of(path)
        for library, rooms in ONLY_IN.items()
        if inside(module, library) and not relative(path).startswith(rooms)
    ]
    assert broken == []


def test_light_rooms_import_nothing_heavy() -> None:
    broken = [
        f"{relative(path)}:{line}: imports {module}"
        for path in source_files()
        for place, libraries in FORBIDDEN.items()
        if relative(path).startswith(place)
        for line, module in imports_of(path)
        if any(inside(module, library) for library in libraries)
    ]
    assert broken == []


def test_algorithms_import_torch_alone_and_nothing_of_ours() -> None:
    import sys

    broken = [
        f"{relative(path)}:{line}: imports {module}"
        for path in source_files()
        if relative(path).startswith("miles/algorithms/")
        for line, module in imports_of(path)
        if module.split(".")[0] not in ("torch", "numpy", *sys.stdlib_module_names)
        and not inside(module, "miles.algorithms")
    ]
    assert broken == []


def test_contracts_import_the_standard_library_alone() -> None:
    import sys

    broken = [
        f"{relative(path)}:{line}: imports {module}"
        for path in source_files()
        if relative(path).startswith("miles/contracts/")
        for line, module in imports_of(path)
        if module.split(".")[0] not in (*sys.stdlib_module_names, "pydantic") and not inside(module, "miles.contracts")
    ]
    assert broken == []


@pytest.mark.parametrize("name", [path.name for path in ROOT.glob("train*.py")] + ["miles/cli.py"])
def test_entry_program_is_short_enough_to_hold_in_the_head(name: str) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) < 150


def test_the_lint_sees_what_it_must_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports of every form, in functions and relative, are found."""
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    file = tmp_path / "miles" / "data" / "x.py"
    file.parent.mkdir(parents=True)
    file.write_text("import ray.util as r\ndef f():\n    from ..ray import actor_group\n    from . import sample\n")
    assert list(imports_of(file)) == [
        (1, "ray.util"),
        (3, "miles.ray.actor_group"),
        (4, "miles.data.sample"),
    ]
