"""The deterministic batch plan of formulas A3.1, against known answers and an independent implementation."""

import hashlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.value_pretraining import ValueDatasetSpec, ValueObjective, ValuePretrainDataset, value_pretrain_num_steps


def plan_by_hand(n: int, g: int, epochs: int, seed: int) -> list[tuple[int, ...]]:
    """Pop rows off a shuffled deck until no whole batch is left."""
    plan = []
    for epoch in range(epochs):
        deck = [*range(n)]
        random.Random(seed + epoch).shuffle(deck)
        deck.reverse()
        while len(deck) >= g:
            plan.append(tuple(deck.pop() for _ in range(g)))
    return plan


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """datasets(n) -> a data set of n rows, opened once per n."""
    opened: dict[int, ValuePretrainDataset] = {}

    def get(n: int) -> ValuePretrainDataset:
        if n not in opened:
            path = tmp_path_factory.mktemp("plan") / "rows.jsonl"
            line = '{{"sample_id":"{}","tokens":[1,2],"response_length":1,"returns":[0]}}\n'
            data = "".join(line.format(i) for i in range(n)).encode()
            path.write_bytes(data)
            spec = ValueDatasetSpec(path, hashlib.sha256(data).hexdigest(), n)
            opened[n] = ValuePretrainDataset(spec, ValueObjective())
        return opened[n]

    return get


def test_batch_plan_known_answers(datasets):
    assert list(datasets(7).batch_indices(global_batch_size=2, epochs=2, seed=82621)) == [
        (2, 6), (4, 1), (3, 5), (3, 2), (0, 5), (4, 6),
    ]  # fmt: skip
    assert list(datasets(5).batch_indices(global_batch_size=2, epochs=1, seed=0)) == [(2, 1), (0, 4)]


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 12), g=st.integers(1, 12), epochs=st.integers(1, 3), seed=st.integers(-(2**40), 2**40))
def test_batch_plan_equals_an_independent_implementation(datasets, n, g, epochs, seed):
    dataset = datasets(n)
    if n < g:
        with pytest.raises(ValueError, match="at least one complete global batch"):
            dataset.batch_indices(global_batch_size=g, epochs=epochs, seed=seed)
        return
    plan = list(dataset.batch_indices(global_batch_size=g, epochs=epochs, seed=seed))
    assert plan == plan_by_hand(n, g, epochs, seed)
    steps = n // g
    assert len(plan) == value_pretrain_num_steps(num_samples=n, global_batch_size=g, epochs=epochs) == steps * epochs
    for epoch in range(epochs):
        rows = [i for batch in plan[epoch * steps : (epoch + 1) * steps] for i in batch]
        assert len(set(rows)) == len(rows) == steps * g


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size must be an integer of at least 1"),
        ({"global_batch_size": True}, "global_batch_size must be an integer"),
        ({"epochs": 0}, "epochs must be an integer of at least 1"),
        ({"epochs": 1.0}, "epochs must be an integer"),
        ({"seed": "1"}, "seed must be an integer"),
        ({"seed": True}, "seed must be an integer"),
        ({"global_batch_size": 6}, "requires at least one complete global batch: 5 rows for global_batch_size=6"),
    ],
)
def test_batch_plan_bad_arguments_are_refused_at_the_call(datasets, changes, message):
    with pytest.raises(ValueError, match=message):
        datasets(5).batch_indices(**{"global_batch_size": 2, "epochs": 1, "seed": 0, **changes})


def test_num_steps_counts_whole_batches_per_epoch():
    assert value_pretrain_num_steps(num_samples=7, global_batch_size=2, epochs=2) == 6
    assert value_pretrain_num_steps(num_samples=8, global_batch_size=8, epochs=1) == 1
