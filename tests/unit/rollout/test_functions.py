"""Functions of the user's: loading them, and what messages say of them."""

import functools

import pytest

from miles.rollout.functions import describe_in, function_name, load_function


@pytest.fixture
def hook(tmp_path):
    file = tmp_path / "my-hook.py"
    file.write_text("LIMIT = 3\ndef reward(sample):\n    return LIMIT\n")
    return file


def test_load_function_from_file_and_from_module(hook):
    assert load_function(f"{hook}:reward")(None) == 3
    assert load_function("json:dumps") is __import__("json").dumps


def test_function_name_is_the_file_or_the_module_it_came_from(hook, monkeypatch):
    assert function_name(load_function(f"{hook}:reward")) == f"{hook}:reward"
    monkeypatch.chdir(hook.parent)
    assert function_name(load_function(f"{hook.name}:reward")) == f"{hook}:reward"
    assert function_name(load_function("json:dumps")) == "json:dumps"
    assert function_name(functools.partial(load_function(f"{hook}:reward"))) == f"{hook}:reward"


def test_load_function_keeps_two_files_of_one_name_apart(hook, tmp_path):
    other = tmp_path / "other" / hook.name
    other.parent.mkdir()
    other.write_text("def reward(sample):\n    return 4\n")
    first, second = load_function(f"{hook}:reward"), load_function(f"{other}:reward")
    assert (first(None), second(None)) == (3, 4)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("reward", "a function is written MODULE:FUNCTION or FILE.py:FUNCTION"),
        ("json:", "a function is written MODULE:FUNCTION"),
        (":dumps", "a function is written MODULE:FUNCTION"),
        ("json:no such", "a function is written MODULE:FUNCTION"),
        ("no_such_module_at_all:f", "importing no_such_module_at_all failed: ModuleNotFoundError"),
        ("json:missing", "json has no missing"),
        ("json:__doc__", "__doc__ is a str, not a function"),
        ("/no/such/file.py:f", "there is no file /no/such/file.py"),
    ],
)
def test_load_function_of_a_bad_path_is_one_line(path, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_function(path)
    assert str(caught.value).startswith(f"function path {path}: ")


def test_load_function_of_a_file_that_fails_names_the_error(tmp_path):
    (tmp_path / "broken.py").write_text("import missing_thing\n")
    with pytest.raises(ValueError, match=r"broken.py failed: ModuleNotFoundError: No module named 'missing_thing'"):
        load_function(f"{tmp_path / 'broken.py'}:f")


def test_load_function_of_a_module_that_is_a_file_of_this_folder_says_how_files_are_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_this_folder.py").write_text("def f(sample): return 1\n")
    with pytest.raises(ValueError, match=r"No module named 'of_this_folder'; a file is given as of_this_folder.py:f"):
        load_function("of_this_folder:f")


@pytest.mark.parametrize("code", ["sys.exit()", "sys.exit(0)", "sys.exit('usage: reward.py FILE')"])
def test_load_function_of_a_script_that_exits_is_an_error_not_the_end_of_the_program(tmp_path, code):
    (tmp_path / "script.py").write_text(f"import sys\n{code}\n")
    with pytest.raises(ValueError, match=r"importing .*script.py failed: SystemExit"):
        load_function(f"{tmp_path / 'script.py'}:f")


@pytest.mark.parametrize(
    ("arguments", "count", "reason"),
    [
        ("prompt, response, label", 1, "missing a required argument: 'response'"),
        ("", 1, "too many positional arguments"),
        ("sample, *, gold", 1, "missing a required argument: 'gold'"),
        ("batch", 2, "too many positional arguments"),
        ("sample, weight=1.0", 1, None),
        ("*everything", 2, None),
    ],
)
def test_load_function_that_cannot_be_called_so_is_refused_by_its_signature(tmp_path, arguments, count, reason):
    (tmp_path / "mine.py").write_text(f"def f({arguments}): pass\n")
    path = f"{tmp_path / 'mine.py'}:f"
    if reason is None:
        assert callable(load_function(path, flag="--flag", arguments=count))
        return
    with pytest.raises(ValueError, match=reason) as refused:
        load_function(path, flag="--flag", arguments=count)
    assert str(refused.value).startswith(f"--flag {path}: it is called with {count} argument")
    assert f"its signature is ({arguments})" in str(refused.value)


@pytest.mark.parametrize(
    "code",
    [
        "async def f(sample): return True",
        "class Asks:\n    async def __call__(self, sample): return True\nf = Asks()",
    ],
)
def test_load_function_that_nobody_awaits_is_refused_where_it_is_async(tmp_path, code):
    (tmp_path / "mine.py").write_text(code + "\n")
    path = f"{tmp_path / 'mine.py'}:f"
    assert callable(load_function(path))
    with pytest.raises(ValueError, match="f is async, a plain function is expected") as refused:
        load_function(path, flag="--flag", awaited=False)
    assert str(refused.value).startswith(f"--flag {path}: ")


def test_describe_in_names_the_last_line_of_the_functions_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import json\ndef inner(text):\n    return json.loads(text)\ndef f(text):\n    return inner(text)\n"
    )
    function = load_function(f"{file}:f")
    with pytest.raises(ValueError) as raised:
        function("{")
    text = describe_in(raised.value, function)
    assert text.startswith("JSONDecodeError: Expecting property name")
    assert text.endswith(f"(line 3 of {file})")


def test_describe_in_of_an_error_after_the_call_is_its_text_alone(hook):
    function = load_function(f"{hook}:reward")
    assert describe_in(ValueError("3 is no reward"), function) == "3 is no reward"
    assert describe_in(KeyError("a"), function) == "KeyError: 'a'"
