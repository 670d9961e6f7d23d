"""A reader sees the old file or the new one, never a part; a kill leaves no half-written artifact."""

import errno
import os
import resource
import subprocess
import sys

import pytest

from miles.contracts.publish import publish_bytes, publish_folder, publish_json


def test_publish_bytes_replaces_and_leaves_no_temporary(tmp_path):
    path = tmp_path / "f"
    publish_bytes(path, b"one")
    publish_bytes(path, b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["f"]


def test_publish_bytes_without_replace_keeps_the_earlier_file(tmp_path):
    path = tmp_path / "f"
    publish_bytes(path, b"one", replace=False)
    with pytest.raises(FileExistsError, match="never replaced"):
        publish_bytes(path, b"two", replace=False)
    assert path.read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["f"]


def test_publish_bytes_without_replace_refuses_a_dangling_link(tmp_path):
    (tmp_path / "f").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError):
        publish_bytes(tmp_path / "f", b"one", replace=False)


def test_publish_bytes_without_replace_loses_no_race(tmp_path, monkeypatch):
    path = tmp_path / "f"
    real_link = os.link

    def link_after_another_program(source, target):
        path.write_bytes(b"theirs")
        real_link(source, target)

    monkeypatch.setattr(os, "link", link_after_another_program)
    with pytest.raises(FileExistsError):
        publish_bytes(path, b"ours", replace=False)
    assert path.read_bytes() == b"theirs"


def test_publish_bytes_fixed_temporary_name_overwrites_a_leftover(tmp_path):
    (tmp_path / ".f.tmp").write_bytes(b"a longer leftover of a killed run")
    publish_bytes(tmp_path / "f", b"new", temporary_name=".f.tmp")
    assert (tmp_path / "f").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["f"]


def test_publish_json_returns_the_bytes_written(tmp_path):
    assert publish_json(tmp_path / "f", {"b": 1, "a": 2}) == b'{"a":2,"b":1}\n'
    assert (tmp_path / "f").read_bytes() == b'{"a":2,"b":1}\n'


def test_publish_bytes_disk_full_names_the_file_and_leaves_nothing(tmp_path):
    # A file size limit fails the write as a full disk does, and needs no privileges.
    code = (
        "import resource, signal, sys; from miles.contracts.publish import publish_bytes\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "try: publish_bytes(sys.argv[1], b'x' * 1000)\n"
        "except OSError as error: print(error)\n"
    )
    assert resource.RLIMIT_FSIZE is not None
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "f")], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == f"[Errno 27] File too large: '{tmp_path / 'f'}'\n"
    assert os.listdir(tmp_path) == []


def fails(publish, error) -> OSError:
    with pytest.raises(error) as raised:
        publish()
    assert type(raised.value) is error
    return raised.value


@pytest.mark.parametrize("replace", [True, False])
def test_publish_errors_name_the_target_and_keep_number_and_class(tmp_path, replace):
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").write_text("x")
    for target, error, number in (
        (tmp_path / "taken", IsADirectoryError if replace else FileExistsError, None),
        (tmp_path / "none" / "f", FileNotFoundError, errno.ENOENT),
        (tmp_path / "file" / "f", NotADirectoryError, errno.ENOTDIR),
    ):
        for publish in (
            lambda target=target: publish_bytes(target, b"one", replace),
            lambda target=target: publish_json(target, {}, replace),
        ):
            raised = fails(publish, error)
            assert (raised.filename, raised.filename2) == (str(target), None)
            assert number in (None, raised.errno)
    assert sorted(os.listdir(tmp_path)) == ["file", "taken"]


def test_publish_folder_errors_name_the_target(tmp_path):
    make_folder(tmp_path / ".tmp", "one")
    assert fails(lambda: publish_folder(tmp_path / ".tmp", tmp_path / "no" / "f"), FileNotFoundError).filename == str(
        tmp_path / "no" / "f"
    )
    # A file that cannot be flushed is told by the name the caller knows too.
    (tmp_path / ".tmp" / "inner" / "dangling").symlink_to(tmp_path / "nowhere")
    assert fails(lambda: publish_folder(tmp_path / ".tmp", tmp_path / "f"), FileNotFoundError).filename == str(
        tmp_path / "f"
    )
    assert os.listdir(tmp_path) == [".tmp"]


def make_folder(path, content):
    path.mkdir()
    (path / "inner").mkdir()
    (path / "inner" / "file").write_text(content)


def test_publish_folder_appears_whole_and_is_not_replaced(tmp_path):
    make_folder(tmp_path / ".tmp", "one")
    publish_folder(tmp_path / ".tmp", tmp_path / "final")
    assert (tmp_path / "final" / "inner" / "file").read_text() == "one"
    make_folder(tmp_path / ".tmp", "two")
    with pytest.raises(FileExistsError, match="never replaced"):
        publish_folder(tmp_path / ".tmp", tmp_path / "final")
    assert (tmp_path / "final" / "inner" / "file").read_text() == "one"


@pytest.mark.parametrize("can_exchange", [True, False])
def test_publish_folder_replace_swaps_and_deletes_the_earlier_one(tmp_path, monkeypatch, can_exchange):
    if not can_exchange:
        monkeypatch.setattr("miles.contracts.publish._exchange", lambda left, right: False)
    make_folder(tmp_path / "final", "one")
    make_folder(tmp_path / ".tmp", "two")
    publish_folder(tmp_path / ".tmp", tmp_path / "final", replace=True)
    assert (tmp_path / "final" / "inner" / "file").read_text() == "two"
    assert os.listdir(tmp_path) == ["final"]
