"""Mixed-label evaluation batches (formulas A6.4) against the known answer and a brute-force re-implementation."""

import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.value_evaluation import scalar_active_label, select_mixed_label_batches


class Rows:
    """What the selection needs of a data set: its length and its rows."""

    def __init__(self, labels):
        self.labels = labels

    def __len__(self):
        return len(self.labels)

    def get(self, index):
        return SimpleNamespace(sample_id=f"s{index}", returns=(self.labels[index],) * 2, loss_mask=(1, 0))


def select_by_brute_force(labels, g, num_batches, seed):
    """The same rule, with plain lists and repeated scans; None where no plan exists."""
    order = []
    for label in labels:
        if label not in order:
            order.append(label)
    piles = [[i for i, label in enumerate(labels) if label == wanted] for wanted in order]
    rng = random.Random(seed)
    for label in sorted(order):
        rng.shuffle(piles[order.index(label)])
    pairs = []
    for _ in range(num_batches):
        best = []
        for _ in range(2):
            choice = None
            for k, pile in enumerate(piles):
                if k in best or not pile:
                    continue
                if choice is None or (len(pile), -order[k]) > (len(piles[choice]), -order[choice]):
                    choice = k
            if choice is None:
                return None
            best.append(choice)
        pairs.append([piles[k].pop() for k in best])
    rest = [i for pile in piles for i in pile]
    rng.shuffle(rest)
    batches = []
    for pair in pairs:
        batch, rest = pair + rest[: g - 2], rest[g - 2 :]
        rng.shuffle(batch)
        batches.append(tuple(batch))
    return tuple(batches)


def test_mixed_batches_known_answer():
    rows = Rows([0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0])
    assert select_mixed_label_batches(rows, global_batch_size=3, num_batches=2, seed=82621) == ((4, 1, 0), (3, 2, 5))


@settings(max_examples=150, deadline=None)
@given(
    labels=st.lists(st.sampled_from([0.0, 1.0, 0.5, -2.0]), min_size=2, max_size=24),
    g=st.integers(2, 6),
    num_batches=st.integers(1, 5),
    seed=st.integers(0, 10**6),
)
def test_mixed_batches_equal_brute_force_disjoint_and_mixed(labels, g, num_batches, seed):
    arguments = {"global_batch_size": g, "num_batches": num_batches, "seed": seed}
    if g * num_batches > len(labels):
        with pytest.raises(ValueError, match="requires disjoint rows"):
            select_mixed_label_batches(Rows(labels), **arguments)
        return
    expected = select_by_brute_force(labels, g, num_batches, seed)
    if expected is None:
        with pytest.raises(ValueError, match="two distinct labels"):
            select_mixed_label_batches(Rows(labels), **arguments)
        return
    batches = select_mixed_label_batches(Rows(labels), **arguments)
    assert batches == expected
    rows = [i for batch in batches for i in batch]
    assert len(set(rows)) == len(rows) == g * num_batches
    assert all(len(batch) == g and len({labels[i] for i in batch}) >= 2 for batch in batches)


@pytest.mark.parametrize(
    ("labels", "changes", "message"),
    [
        ([0.0, 1.0] * 4, {"global_batch_size": 1}, "global_batch_size of at least 2"),
        ([0.0, 1.0] * 4, {"global_batch_size": True}, "global_batch_size must be an integer"),
        ([0.0, 1.0] * 4, {"num_batches": 0}, "num_batches must be an integer of at least 1"),
        ([0.0, 1.0] * 4, {"seed": True}, "seed must be an integer"),
        ([0.0, 1.0] * 4, {"num_batches": 5}, "requires disjoint rows: 5 batches of 2 need 10, the split has 8"),
        ([1.0] * 8, {}, "rows of two distinct labels, the split has only 1"),
        ([0.0] * 7 + [1.0], {"num_batches": 2}, "batch 1 of 2 cannot hold two distinct labels: only rows labelled 0"),
    ],
)
def test_mixed_batches_refusals(labels, changes, message):
    with pytest.raises(ValueError, match=message):
        select_mixed_label_batches(Rows(labels), **{"global_batch_size": 2, "num_batches": 1, "seed": 0, **changes})


def test_scalar_active_label_looks_at_active_targets_only():
    sample = SimpleNamespace(sample_id="s", returns=(0.3, 1.0, 1), loss_mask=(0, 1, 1))
    assert scalar_active_label(sample) == 1.0
    with pytest.raises(ValueError, match=r"sample 's' must have one scalar active label .* got 2: 0\.3, 1"):
        scalar_active_label(SimpleNamespace(sample_id="s", returns=(0.3, 1.0), loss_mask=(1, 1)))
