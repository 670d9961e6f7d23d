"""A held-out prompt that was trained on is found, whatever follows it."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles.data.value_leak import refuse_leaking_prompts
from miles.value_pretraining import load_value_pretrain_manifest


@pytest.fixture
def manifest_of(make_manifest: Callable[..., Path], value_row: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
    def make(train: list[list[int]], heldout: list[list[int]]) -> Any:
        rows = [value_row(number, tokens=[*prompt, 7, 8]) for number, prompt in enumerate(train + heldout)]
        return load_value_pretrain_manifest(
            str(make_manifest(rows[: len(train)], heldout=rows[len(train) :])), expected_sha256=None
        )

    return make


def test_held_out_prompt_in_train_split_refused_by_both_lines(manifest_of: Callable[..., Any]) -> None:
    manifest = manifest_of([[1, 2], [3], [4, 5, 6]], [[9], [4, 5, 6]])
    with pytest.raises(ValueError, match=r"heldout.*:2: leaking prompt: .*train.*:3 trains on the same prompt tokens"):
        refuse_leaking_prompts(manifest)


def test_prompts_that_only_begin_alike_accepted(manifest_of: Callable[..., Any]) -> None:
    refuse_leaking_prompts(manifest_of([[1, 2], [3], [11, 2]], [[1], [1, 2, 3], [1, 12]]))


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_data_that_is_elsewhere_warned_of(
    split: str, manifest_of: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    manifest = manifest_of([[1]], [[2]])
    path = getattr(manifest, split).path
    path.unlink()
    with caplog.at_level(logging.WARNING):
        refuse_leaking_prompts(manifest)
    assert f"{path} is not here: nobody looks whether held-out prompts are trained on" in caplog.text
