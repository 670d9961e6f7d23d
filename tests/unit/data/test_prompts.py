"""The prompt stream: complete epochs, exact resumption, clear refusals."""

import copy
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.data.prompts import PromptSource, check_prompt_file


def write(path: Path, rows: list) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def eight(tmp_path_factory, char_tokenizer):
    """Path of eight prompts "0+1=" ... "7+1=" and the tokenizer."""
    rows = [{"prompt": f"{i}+1=", "label": i + 1, "metadata": {"i": i}} for i in range(8)]
    return write(tmp_path_factory.mktemp("prompts") / "eight.jsonl", rows), char_tokenizer


def indices(source: PromptSource, n: int) -> list[int]:
    return [index for index, _ in source.get(n)]


def test_get_row_carries_text_ids_label_and_metadata(eight):
    path, tokenizer = eight
    source = PromptSource(path, tokenizer=tokenizer, shuffle=False)
    index, row = source.get(1)[0]
    assert (index, row.index, row.prompt, row.label, row.metadata) == (0, 0, "0+1=", 1, {"i": 0})
    assert tokenizer.decode(row.tokens).replace(" ", "") == "0+1="


def test_prompts_special_tokens_only_on_request(eight):
    path, tokenizer = eight
    plain = PromptSource(path, tokenizer=tokenizer)[0].tokens
    assert PromptSource(path, tokenizer=tokenizer, add_special_tokens=True)[0].tokens == [1, *plain]


def test_get_each_epoch_covers_every_prompt_in_its_own_seeded_order(eight):
    # faults.md row 45
    path, tokenizer = eight
    source = PromptSource(path, tokenizer=tokenizer, seed=42)
    epochs = [indices(source, 8) for _ in range(3)]
    for number, epoch in enumerate(epochs):
        expected = list(range(8))
        random.Random(42 + number).shuffle(expected)
        assert epoch == expected
    assert epochs[0] != epochs[1]


def test_get_other_seed_gives_another_order(eight):
    # faults.md row 44
    path, tokenizer = eight
    assert indices(PromptSource(path, tokenizer=tokenizer, seed=1), 8) != indices(
        PromptSource(path, tokenizer=tokenizer, seed=2), 8
    )


def test_get_more_than_the_file_wraps_into_new_epochs(eight):
    # 20 of 8 prompts are 20 prompts: two whole epochs and a half
    path, tokenizer = eight
    at_once = indices(PromptSource(path, tokenizer=tokenizer), 20)
    assert len(at_once) == 20
    assert sorted(at_once[:8]) == sorted(at_once[8:16]) == list(range(8))


@settings(max_examples=40, deadline=None)
@given(requests=st.lists(st.integers(1, 11), min_size=1, max_size=6), stop=st.integers(0, 6), shuffle=st.booleans())
def test_resume_at_any_point_continues_the_same_stream(eight, requests, stop, shuffle):
    # faults.md rows 35, 37, 44, 45: no prompt lost, none repeated, epoch boundaries included
    path, tokenizer = eight
    whole = PromptSource(path, tokenizer=tokenizer, shuffle=shuffle)
    expected = [indices(whole, n) for n in requests]
    first = PromptSource(path, tokenizer=tokenizer, shuffle=shuffle)
    got = [indices(first, n) for n in requests[:stop]]
    second = PromptSource(path, tokenizer=tokenizer, shuffle=shuffle)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    got += [indices(second, n) for n in requests[stop:]]
    assert got == expected


def test_resume_at_the_epoch_boundary_still_has_prompts(eight):
    # faults.md row 35: saved exactly after an epoch, the next epoch follows
    path, tokenizer = eight
    first = PromptSource(path, tokenizer=tokenizer)
    first.get(8)
    second = PromptSource(path, tokenizer=tokenizer)
    second.load_state_dict(first.state_dict())
    assert sorted(indices(second, 8)) == list(range(8))


def test_load_state_dict_other_data_or_seed_refused(eight, tmp_path):
    path, tokenizer = eight
    state = PromptSource(path, tokenizer=tokenizer).state_dict()
    with pytest.raises(ValueError, match="seed was 42, is now 43"):
        PromptSource(path, tokenizer=tokenizer, seed=43).load_state_dict(state)
    other = write(tmp_path / "other.jsonl", [{"prompt": "1+1="}] * 8)
    with pytest.raises(ValueError, match="sha256 was"):
        PromptSource(other, tokenizer=tokenizer).load_state_dict(state)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "1"}, '{"prompt": '], ":2: not valid JSON"),
        ([{"prompt": "1"}, "", "[1]"], ":3: expected a JSON object, got list"),
        ([{"promt": "1"}], ":1: no key 'prompt'; the row has .'promt'."),
        ([{"prompt": ["1"]}], ":1: 'prompt' must be a string"),
        ([{"prompt": ""}], ":1: the prompt has no tokens"),
        ([{"prompt": "1", "metadata": [1]}], ":1: 'metadata' must be a JSON object"),
        ([{"prompt": "1", "metadata": 0}], ":1: 'metadata' must be a JSON object"),
        (['{"prompt": "1", "prompt": "2"}'], ":1: not valid JSON: duplicate key 'prompt'"),
        (['{"prompt": "1", "label": NaN}'], ":1: not valid JSON: NaN is not valid JSON"),
        (["[" * 100_000], ":1: not valid JSON: nested too deeply"),
        (['{"prompt": "1", "label": "\\ud800"}'], r":1: '.ud800' is half of a character"),
        ([], "no prompts"),
        (["", "   "], "no prompts"),
        ([{"prompt": "12345"}], ":1: the prompt has 5 tokens, at most 4"),
    ],
)
def test_prompts_bad_file_refused_with_the_line(tmp_path, char_tokenizer, rows, message):
    path = write(tmp_path / "bad.jsonl", rows)
    with pytest.raises(ValueError, match=message) as error:
        PromptSource(path, tokenizer=char_tokenizer, max_prompt_len=4)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_prompts_bytes_that_are_no_text_refused_with_the_line(tmp_path, char_tokenizer):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "1"}\n{"prompt": "\xff\xfe"}\n')
    with pytest.raises(ValueError, match=":2: not valid JSON"):
        PromptSource(path, tokenizer=char_tokenizer)


def test_prompts_missing_file_and_missing_key_named(tmp_path, char_tokenizer):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl: no such file"):
        PromptSource(tmp_path / "nowhere.jsonl", tokenizer=char_tokenizer)
    path = write(tmp_path / "a.jsonl", [{"prompt": "1", "label": 1}])
    with pytest.raises(ValueError, match="no row has the key 'lable'"):
        PromptSource(path, tokenizer=char_tokenizer, label_key="lable")


def test_prompts_overlong_dropped_and_counted(tmp_path, char_tokenizer):
    path = write(tmp_path / "a.jsonl", [{"prompt": "12"}, {"prompt": "12345"}, {"prompt": "34"}])
    source = PromptSource(path, tokenizer=char_tokenizer, max_prompt_len=4, overlong="drop", shuffle=False)
    assert (len(source), source.num_dropped) == (2, 1)
    assert [row.prompt for _, row in source.get(2)] == ["12", "34"]
    with pytest.raises(ValueError, match=r"no prompts \(3 were longer than 1 tokens"):
        PromptSource(path, tokenizer=char_tokenizer, max_prompt_len=1, overlong="drop")


def test_prompts_chat_template_brings_its_own_special_tokens(tmp_path, char_tokenizer):
    rows = [{"prompt": "1+1"}, {"prompt": [{"role": "user", "content": "1"}, {"role": "user", "content": "2"}]}]
    path = write(tmp_path / "chat.jsonl", rows)
    source = PromptSource(
        path, tokenizer=char_tokenizer, apply_chat_template=True, add_special_tokens=True, shuffle=False
    )
    assert [source[i].prompt for i in (0, 1)] == ["<user>1+1<assistant>", "<user>1<user>2<assistant>"]
    tokens = source[0].tokens
    assert (tokens[0], tokens[-1], len(tokens)) == (3, 4, 5)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "user", "contents": "1"}, r"message 1 of 'prompt' must have content; it has \['contents', 'role'\]"),
        ({"role": "user", "content": None}, "must have content that is text, got null"),
        ({"role": "user", "content": ["1"]}, "must have content that is text, got list"),
        ({"role": "user", "content": {"text": "1"}}, "must have content that is text, got dict"),
        ({"content": "1"}, "must have a role that is text"),
        ({"role": 1, "content": "1"}, "must have a role that is text"),
        ("1", "must be an object, got str"),
    ],
)
def test_message_that_a_template_would_write_otherwise_is_refused_by_line(tmp_path, char_tokenizer, message, problem):
    path = write(tmp_path / "chat.jsonl", [{"prompt": "1"}, {"prompt": [{"role": "user", "content": "1"}, message]}])
    with pytest.raises(ValueError, match=rf"^{path}:2: .*{problem}"):
        check_prompt_file(path, input_key="prompt", metadata_key="metadata", apply_chat_template=True)
    with pytest.raises(ValueError, match=rf"^{path}:2: .*{problem}"):
        PromptSource(path, tokenizer=char_tokenizer, apply_chat_template=True)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]},
        {"role": "assistant", "reasoning_content": "one and one"},
        {"role": "tool", "content": {"sum": 2}},
        {"role": "user", "content": [{"type": "text", "text": "1"}]},
    ],
)
def test_message_that_says_it_otherwise_than_by_text_is_accepted(tmp_path, message):
    path = write(tmp_path / "chat.jsonl", [{"prompt": [{"role": "user", "content": "1"}, message]}])
    check_prompt_file(path, input_key="prompt", metadata_key="metadata", apply_chat_template=True)


def test_parts_of_content_are_refused_only_where_the_template_does_not_know_them(tmp_path, char_tokenizer):
    path = write(
        tmp_path / "chat.jsonl", [{"prompt": [{"role": "user", "content": [{"type": "text", "text": "1+"}]}]}]
    )
    with pytest.raises(
        ValueError, match=rf"^{path}:1: the chat template does not know content in parts: it writes \[\{{"
    ):
        PromptSource(path, tokenizer=char_tokenizer, apply_chat_template=True)
    knowing = copy.copy(char_tokenizer)
    knowing.chat_template = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    assert PromptSource(path, tokenizer=knowing, apply_chat_template=True)[0].prompt == "1+"


def test_template_that_refuses_an_order_of_roles_is_told_with_the_line(tmp_path, char_tokenizer):
    char_tokenizer = copy.copy(char_tokenizer)
    char_tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    path = write(tmp_path / "chat.jsonl", [{"prompt": "1"}])
    with pytest.raises(ValueError, match=rf"^{path}:1: the chat template: TemplateError: roles must alternate"):
        PromptSource(path, tokenizer=char_tokenizer, apply_chat_template=True)


def test_prompts_more_rows_than_one_tokenizer_call_keep_their_ids(tmp_path, char_tokenizer):
    path = write(tmp_path / "many.jsonl", [{"prompt": str(i)} for i in range(2500)])
    source = PromptSource(path, tokenizer=char_tokenizer)
    for i in (0, 1023, 1024, 2048, 2499):
        assert source[i].tokens == char_tokenizer(str(i), add_special_tokens=False)["input_ids"]


def test_getitem_outside_raises_index_error(eight):
    path, tokenizer = eight
    source = PromptSource(path, tokenizer=tokenizer)
    for index in (-1, 8):
        with pytest.raises(IndexError):
            source[index]
    with pytest.raises(ValueError, match="at least 1"):
        source.get(0)


def test_getitem_row_that_was_edited_meanwhile_is_refused_by_line(tmp_path, char_tokenizer):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "1", "label": 1}, {"prompt": "2", "label": 2}])
    source = PromptSource(path, tokenizer=char_tokenizer)
    write(path, [{"prompt": "1", "label": 1}, {"prompt": "2", "label": 3}])
    assert source[0].label == 1
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: changed since the run began"):
        source[1]
