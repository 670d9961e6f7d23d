"""Decode attention of SGLang's torch_native backend for many requests at once, in place of one by one.

SGLang's own loop spends some 200 microseconds of a CPU on each request, layer and token; a small model takes most of
its time there.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

# Padded tokens of one call: long enough to make the calls few, short enough to keep its keys in the cache of a core.
_PADDED_TOKENS = 16_384


def attend(
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scaling: float | None,
) -> torch.Tensor:
    """Fill `output` with the attention of each request's newest token over all of its tokens, and return it.

    query, output: (requests, heads, head size); k_cache, v_cache: (slots, key-value heads, head size); req_to_token:
    (request slots, context length) cache slots; req_pool_indices, seq_lens: (requests,).
    """
    requests, heads, _ = query.shape
    kv_heads = k_cache.shape[1]
    # Neighbours of nearly equal length waste little on padding.
    order = seq_lens.argsort(descending=True, stable=True)
    lengths = seq_lens[order].tolist()
    kv_head = torch.arange(kv_heads, device=seq_lens.device)[:, None]
    start = 0
    while start < requests:
        width = lengths[start]
        rows = order[start : start + max(1, _PADDED_TOKENS // width)]
        slots = req_to_token[req_pool_indices[rows], :width].to(torch.int64)
        mask = torch.arange(width, device=seq_lens.device) < seq_lens[rows, None]
        # A row of the flattened cache for each head: index_select copies rows several times as fast as indexing does.
        cache_rows = (slots[:, None] * kv_heads + kv_head).flatten()
        keys, values = (
            cache.flatten(0, 1).index_select(0, cache_rows).unflatten(0, (len(rows), kv_heads, width)).to(query.dtype)
            for cache in (k_cache, v_cache)
        )
        # The heads that share a key-value head stand where the queries of a sequence usually do.
        grouped = query[rows].unflatten(1, (kv_heads, heads // kv_heads))
        attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask[:, None, None], scale=scaling)
        output[rows] = attended.flatten(1, 2)
        start += len(rows)
    return output


def install(backend: type) -> None:
    """Make `TorchNativeAttnBackend` decode by `attend`, but where it has a window or an encoder to look at."""
    one_by_one = backend._run_sdpa_forward_decode

    def decode(self, *tensors, scaling=None, is_cross_attn=False, sliding_window_size=None, **others):
        *tensors, encoder_lens = tensors
        windowed = sliding_window_size is not None and sliding_window_size > -1
        if encoder_lens is None and not is_cross_attn and not windowed:
            return attend(*tensors, scaling=scaling)
        others |= {"is_cross_attn": is_cross_attn, "sliding_window_size": sliding_window_size}
        return one_by_one(self, *tensors, encoder_lens, scaling=scaling, **others)

    backend._run_sdpa_forward_decode = decode
