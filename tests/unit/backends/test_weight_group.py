"""Cutting weights into buckets; the group itself is tested with processes in tests/cpu."""

import pytest
import torch

from miles.backends.weight_group import plan_buckets

F32, BF16 = torch.float32, torch.bfloat16


def names(buckets):
    return [list(bucket.names) for bucket in buckets]


def test_buckets_keep_order_and_stay_within_the_limit():
    tensors = [("a", F32, (10,)), ("b", F32, (10,)), ("c", F32, (5,)), ("d", F32, (100,)), ("e", F32, ())]
    buckets = plan_buckets(tensors, max_bytes=80)
    assert names(buckets) == [["a", "b"], ["c"], ["d"], ["e"]]
    assert [bucket.nbytes for bucket in buckets] == [80, 20, 400, 4]
    assert buckets[0].dtypes == ("float32", "float32") and buckets[0].shapes == ((10,), (10,))


def test_buckets_never_mix_element_sizes():
    assert names(plan_buckets([("a", F32, (1,)), ("b", BF16, (3,)), ("c", BF16, (1,)), ("d", F32, (1,))])) == [
        ["a"],
        ["b", "c"],
        ["d"],
    ]


@pytest.mark.parametrize("max_bytes", [1, 4, 1000])
def test_buckets_hold_every_tensor_once(max_bytes):
    tensors = [(f"t{n}", F32, (n % 4 + 1,)) for n in range(20)]
    flat = [name for bucket in plan_buckets(tensors, max_bytes=max_bytes) for name in bucket.names]
    assert flat == [name for name, _, _ in tensors]


def test_no_tensors_give_no_buckets():
    assert plan_buckets([]) == []
