"""A checkpoint manifest vouches for every file of its folder."""

import hashlib
import json

import pytest

from miles.contracts.artifact import (
    CHECKPOINT_MANIFEST_NAME,
    check_checkpoint_digests,
    check_checkpoint_listing,
    checkpoint_files,
    hash_files,
    read_checkpoint_manifest,
    write_checkpoint_manifest,
)
from miles.contracts.canonical import canonical_json_bytes, sealed


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "c" / "deep").mkdir(parents=True)
    (tmp_path / "c" / "a.bin").write_bytes(b"abc")
    (tmp_path / "c" / "deep" / "b.bin").write_bytes(b"")
    write_checkpoint_manifest(tmp_path / "c", iteration=7, role="critic", head={"num_bins": 51})
    return tmp_path / "c"


def verify(folder):
    manifest = check_checkpoint_listing(folder)
    check_checkpoint_digests(folder, manifest, hash_files(checkpoint_files(folder, manifest)))
    return manifest


def test_checkpoint_manifest_lists_every_file_with_size_and_digest(folder):
    manifest = verify(folder)
    assert manifest["facts"] == {"iteration": 7, "role": "critic", "head": {"num_bins": 51}}
    assert manifest["files"] == [
        {"path": "a.bin", "size": 3, "sha256": hashlib.sha256(b"abc").hexdigest()},
        {"path": "deep/b.bin", "size": 0, "sha256": hashlib.sha256(b"").hexdigest()},
    ]


def test_checkpoint_manifest_written_again_is_the_same(folder):
    before = (folder / CHECKPOINT_MANIFEST_NAME).read_bytes()
    write_checkpoint_manifest(folder, iteration=7, role="critic", head={"num_bins": 51})
    assert (folder / CHECKPOINT_MANIFEST_NAME).read_bytes() == before


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda f: (f / "a.bin").write_bytes(b"abd"), ValueError, "a.bin: SHA-256 mismatch"),
        (lambda f: (f / "a.bin").write_bytes(b"ab"), ValueError, "a.bin: size mismatch: expected 3 bytes, got 2"),
        (lambda f: (f / "a.bin").unlink(), FileNotFoundError, "a.bin: listed in checkpoint_manifest.json but missing"),
        (lambda f: (f / "deep" / "c.bin").write_bytes(b""), ValueError, "c.bin: not listed"),
        (lambda f: (f / "l").symlink_to(f / "a.bin"), ValueError, "l: a symbolic link cannot be part"),
        (lambda f: (f / CHECKPOINT_MANIFEST_NAME).unlink(), FileNotFoundError, "not a complete checkpoint"),
    ],
)
def test_verify_checkpoint_damaged_names_the_file(folder, damage, error, message):
    damage(folder)
    with pytest.raises(error, match=message):
        verify(folder)


def test_verify_checkpoint_expected_digest_differs_is_refused(folder):
    with pytest.raises(ValueError, match="checkpoint manifest SHA-256 mismatch: expected 0000"):
        check_checkpoint_listing(folder, expected_sha256="0" * 64)


def test_read_checkpoint_manifest_edited_is_refused(folder):
    path = folder / CHECKPOINT_MANIFEST_NAME
    path.write_bytes(path.read_bytes().replace(b'"iteration":7', b'"iteration":8'))
    with pytest.raises(ValueError, match="was changed after it was written"):
        read_checkpoint_manifest(folder)


def test_read_checkpoint_manifest_pointing_outside_is_refused(folder):
    path = folder / CHECKPOINT_MANIFEST_NAME
    manifest = json.loads(path.read_bytes())
    manifest["files"][0]["path"] = "../x"
    path.write_bytes(canonical_json_bytes(sealed(manifest)))
    with pytest.raises(ValueError, match="points outside the checkpoint"):
        read_checkpoint_manifest(folder)


def test_write_checkpoint_manifest_empty_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="without files"):
        write_checkpoint_manifest(tmp_path)
