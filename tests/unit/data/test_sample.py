"""A sample's per-token columns stay aligned, and it survives JSON."""

import json

import pytest

from miles.data.sample import Sample, SampleStatus, read_samples


def new_sample() -> Sample:
    return Sample(index=7, group_index=1, rollout_id=3, prompt="1+1=", tokens=[5, 6, 7])


def test_append_response_tokens_two_turns_give_two_runs_of_ones():
    # faults.md row 64: what the policy wrote is trained (its stop token 9 included), what a tool wrote is not
    sample = new_sample()
    sample.append_response_tokens([8, 9], log_probs=[-0.1, -0.2])
    sample.append_response_tokens([20, 21, 22], trainable=False)
    sample.append_response_tokens([8, 9], log_probs=[-0.3, -0.4])
    assert sample.tokens == [5, 6, 7, 8, 9, 20, 21, 22, 8, 9]
    assert sample.loss_mask == [1, 1, 0, 0, 0, 1, 1]
    assert sample.rollout_log_probs == [-0.1, -0.2, 0.0, 0.0, 0.0, -0.3, -0.4]
    assert (sample.prompt_length, sample.response_length) == (3, 7)
    assert sample.response_tokens == [8, 9, 20, 21, 22, 8, 9]
    sample.check_aligned()


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([1, 2], {"log_probs": [-0.1]}, "2 tokens came with 1 log_probs"),
        ([1], {}, "need log_probs"),
        ([1], {"log_probs": [-0.1], "trainable": False}, "take no log_probs"),
        ([1], {"log_probs": [float("nan")]}, r"log_probs\[0\] is nan"),
        ([-1], {"log_probs": [-0.1]}, "integers >= 0"),
        ([True], {"log_probs": [-0.1]}, "integers >= 0"),
        (["a"], {"log_probs": [-0.1]}, "integers >= 0"),
    ],
)
def test_append_response_tokens_bad_input_raises_and_changes_nothing(tokens, options, message):
    # faults.md row 63: ids and log-probabilities that do not belong together are refused
    sample, untouched = new_sample(), new_sample()
    with pytest.raises(ValueError, match=message):
        sample.append_response_tokens(tokens, **options)
    assert sample == untouched


def test_append_response_tokens_end_token_equal_to_pad_is_trained():
    # faults.md row 5: the mask is made from what was generated, never from token values
    sample = new_sample()
    pad_and_end = 0
    sample.append_response_tokens([5, pad_and_end], log_probs=[-0.1, -0.2])
    assert sample.loss_mask == [1, 1]


def test_sample_json_round_trip_gives_the_same_sample():
    sample = new_sample()
    sample.append_response_tokens([8, 9], log_probs=[-0.1, -0.2])
    sample.status, sample.reward, sample.label = SampleStatus.TRUNCATED, 0.5, {"answer": "2"}
    sample.weight_versions, sample.metadata = ["3"], {"difficulty": 1}
    assert Sample.from_dict(json.loads(json.dumps(sample.to_dict()))) == sample


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewrad": 1}, "unknown fields: rewrad"),
        ({"loss_mask": [1]}, "loss_mask has 1 entries, response_length is 0"),
        ({"status": "done"}, "done"),
        ({"loss_mask": 1}, "sample 7: loss_mask must be a list of bool or float or int, got int"),
        ({"rollout_log_probs": None}, "rollout_log_probs must be a list of float or int, got NoneType"),
        ({"tokens": [1, "2", 3]}, "tokens must be a list of int, got str"),
        ({"tokens": [1, 10**30]}, "sample 7: tokens has an integer of more than 64 bits"),
        ({"rollout_log_probs": [-(10**400)]}, "sample 7: rollout_log_probs has an integer of more than 64 bits"),
        ({"reward": 10**400}, "sample 7: reward has an integer of more than 64 bits"),
        ({"weight_versions": [1]}, "weight_versions must be a list of str, got int"),
        ({"index": "0"}, "index must be int, got str"),
        ({"response_length": True}, "response_length must be int, got bool"),
        ({"metadata": None}, "metadata must be dict, got NoneType"),
        ({"reward": "1"}, "reward must be bool or float or int or null, got str"),
        ({"response_length": 9, "loss_mask": [1] * 9, "rollout_log_probs": [0.0] * 9}, "does not fit 3 tokens"),
    ],
)
def test_sample_from_dict_bad_record_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Sample.from_dict(new_sample().to_dict() | change)


def test_sample_from_dict_missing_field_named():
    record = new_sample().to_dict()
    del record["tokens"]
    with pytest.raises(ValueError, match="misses fields: tokens"):
        Sample.from_dict(record)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", r":2: not UTF-8: byte 0xff at offset 0"),
        (b"\xef\xbb\xbf{}", ":2: starts with a byte-order mark"),
        (b"[" * 100_000, ":2: nested too deeply"),
        (b'{"index": 0, "index": 1}', ":2: duplicate key 'index'"),
        (b"[1]", ":2: expected a JSON object"),
    ],
)
def test_read_samples_damaged_line_named(tmp_path, content, message):
    path = tmp_path / "rollout_000000.jsonl"
    path.write_bytes(json.dumps(new_sample().to_dict()).encode() + b"\n" + content + b"\n")
    with pytest.raises(ValueError, match=message) as refused:
        read_samples(path)
    assert str(refused.value).startswith(f"{path}:2: ")
