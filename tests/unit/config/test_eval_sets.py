"""Evaluation sets and their sampling as the command line writes them."""

from pathlib import Path

import pytest

from miles.config import Args


def test_one_path_is_a_set_without_a_name() -> None:
    (one,) = Args.build(eval_prompt_data="x.jsonl", eval_temperature=0.5, rollout_max_response_len=9).eval_sets()
    assert (one.name, one.path) == ("", "x.jsonl")
    assert one.metric("accuracy") == "eval/accuracy"
    assert (one.sampling.temperature, one.sampling.max_response_len, one.sampling.top_p) == (0.5, 9, 1.0)


def test_named_sets_have_sampling_of_their_own() -> None:
    args = Args.build(
        eval_prompt_data=["math:m.jsonl", "aime:a.jsonl"],
        eval_sampling=["aime:temperature=0.6,n_samples=16,top_p=0.95,max_response_len=64"],
        eval_max_prompts=5,
    )
    math, aime = args.eval_sets()
    assert (math.sampling.temperature, math.sampling.n_samples) == (0.0, 1)
    assert (aime.sampling.temperature, aime.sampling.n_samples, aime.sampling.top_p) == (0.6, 16, 0.95)
    assert (aime.sampling.max_response_len, aime.sampling.max_prompts) == (64, 5)
    assert aime.metric("accuracy") == "eval/aime/accuracy"


def test_two_samplings_of_one_set_add_up() -> None:
    args = Args.build(eval_prompt_data=["two:t.jsonl"], eval_sampling=["two:temperature=1.0", "two:n_samples=2"])
    (two,) = args.eval_sets()
    assert (two.sampling.temperature, two.sampling.n_samples) == (1.0, 2)


def test_path_with_a_colon_that_exists_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a:b").write_text("")
    (one,) = Args.build(eval_prompt_data="a:b").eval_sets()
    assert (one.name, one.path) == ("", "a:b")


@pytest.mark.parametrize(
    ("sets", "sampling", "message"),
    [
        (["a:x", "a:y"], [], "the name 'a' twice"),
        (["x", "y"], [], "two sets without a name"),
        (["a:x"], ["b:top_p=1"], "expected NAME:key=value,... with the name of a set .a."),
        (["a:x"], ["a:heat=1"], "unknown key 'heat'"),
        (["a:x"], ["a:top_p=much"], "top_p must be a number, got 'much'"),
        (["a:x"], ["a:top_p=2"], "top_p 2 is out of range"),
        (["a:x"], ["a:n_samples=0"], "n_samples 0 is out of range"),
        (["a:x"], ["a:temperature=inf"], "temperature inf is out of range"),
        (["a:x"], ["a:temperature=1e-7"], "temperature 1e-7 is out of range"),
        (["a:x"], ["a:top_k=0"], "top_k 0 is out of range"),
        (["a:x"], ["a:top_p=0.5,top_p=1"], "top_p is given twice"),
    ],
)
def test_mistake_is_one_line(sets: list[str], sampling: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Args.build(eval_prompt_data=sets, eval_sampling=sampling).eval_sets()
