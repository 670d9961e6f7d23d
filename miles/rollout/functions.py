"""Functions of the user's: how they are loaded from a module or a file, and how messages call them."""

import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles.config.choices import split_function

_OF_A_FILE = "miles_hook_"
"""What the names of modules begin with that were loaded from a file."""

Function = Callable[..., Any]


class FunctionFailed(ValueError):
    """A function of the user's raised, or its process ended; the text says it in one line."""


def load_function(
    path: str, *, flag: str = "function path", arguments: int | None = None, awaited: bool = True
) -> Function:
    """The function at "package.module:function" or "path/to/file.py:function".

    Args:
        flag: what the path was given as, for the message.
        arguments: how many it will be called with, by position; None does not ask.
        awaited: it may be async.

    Raises:
        ValueError: malformed path, no such file, module or function, an error while the module was imported, a
            function that cannot be called with so many arguments, or an async one that nobody would await.
    """
    given = f"{flag} {path}"
    try:
        where, name = split_function(path)
    except ValueError as error:
        raise ValueError(f"{given}: {error}") from None
    if where.endswith(".py"):
        module = _load_file(Path(where), given)
    else:
        try:
            module = importlib.import_module(where)
        except (Exception, SystemExit) as error:
            file = Path(*where.split(".")).with_suffix(".py")
            hint = f"; a file is given as {file}:{name}" if file.is_file() else ""
            raise ValueError(f"{given}: importing {where} failed: {describe(error)}{hint}") from error
    function = vars(module).get(name)
    if function is None:
        raise ValueError(f"{given}: {where} has no {name}")
    if not callable(function):
        raise ValueError(f"{given}: {name} is a {type(function).__name__}, not a function")
    if arguments is not None:
        _refuse_other_arguments(function, arguments, given)
    if not awaited and is_async(function):
        raise ValueError(f"{given}: {name} is async, a plain function is expected")
    return function


def source_file(path: str) -> Path | None:
    """The file that a user's function is loaded from; None for one of miles itself, or of no file."""
    where, _ = split_function(path)
    if where.startswith("miles."):
        return None
    spec = None if where.endswith(".py") else importlib.util.find_spec(where)
    file = Path(where if spec is None else spec.origin or "")
    return file if file.is_file() else None


def _refuse_other_arguments(function: Function, count: int, given: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # Some builtins do not tell.
        return
    try:
        signature.bind(*[None] * count)
    except TypeError as error:
        what = "1 argument" if count == 1 else f"{count} arguments"
        raise ValueError(f"{given}: it is called with {what}, its signature is {signature}: {error}") from None


def _load_file(file: Path, given: str) -> Any:
    if not file.is_file():
        raise ValueError(f"{given}: there is no file {file}")
    # The full path in the name: two files may share their last part.
    file = file.resolve()
    module_name = _OF_A_FILE + "".join(c if c.isalnum() else "_" for c in str(file.with_suffix("")))
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        # A script without a main guard would end this program too, and not even as a failure.
        del sys.modules[module_name]
        raise ValueError(f"{given}: importing {file} failed: {describe(error)}") from error
    return module


def is_async(function: Function) -> bool:
    """Whether a call has to be awaited."""
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def function_name(function: Function) -> str:
    """As messages call it: "package.module:function" or "/path/to/file.py:function"."""
    function = _inner(function)
    module = str(getattr(function, "__module__", "?"))
    where = sys.modules[module].__file__ if module.startswith(_OF_A_FILE) else module
    return f"{where}:{getattr(function, '__qualname__', type(function).__qualname__)}"


def _inner(function: Function) -> Function:
    """What a `functools.partial` calls."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def describe(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, FunctionFailed):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def describe_in(error: BaseException, function: Function) -> str:
    """An error of a call in one line, with the last line of the function's own file that it came through."""
    file = getattr(sys.modules.get(_inner(function).__module__), "__file__", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if lines:
        return f"{describe(error)} (line {lines[-1]} of {file})"
    # What was made of its result says what is wrong with it.
    return str(error) if isinstance(error, ValueError) else describe(error)
