"""A micro-batch fills lines up with a token id that a response may hold as well."""

from typing import Any

import pytest
import torch

from miles.backends.megatron.micro_batch import build_micro_batch


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_response_tokens_equal_to_the_filling_are_predicted_and_trained(packed: bool) -> None:
    # faults.md row 5: response [5, eos] where eos is the padding's id has the mask [1, 1]
    shard: dict[str, Any] = {
        "tokens": [[7, 5, 0], [3, 9, 4, 0, 0, 0], [8, 0]],
        "response_lengths": [2, 4, 1],
        "loss_masks": [[1, 1], [1, 0, 1, 1], [1]],
        "sample_indices": [0, 1, 2],
    }
    found = build_micro_batch(
        shard, [0, 1, 2], columns=(), device=torch.device("cpu"), packed=packed, length_multiple=4
    )
    assert found.targets_L.tolist() == [5, 0, 4, 0, 0, 0, 0]
    assert found.mask_T.tolist() == [True, True, True, False, True, True, True]
    # each is read one place after the one that predicts it, and every row begins at position 0
    assert found.input_ids.flatten()[found.positions_L + 1].tolist() == found.targets_L.tolist()
    assert found.position_ids.flatten()[found.positions_L].tolist() == [0, 1, 1, 2, 3, 4, 0]
