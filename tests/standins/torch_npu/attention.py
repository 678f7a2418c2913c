"""Attention of torch_npu, in torch's own arithmetic: at once, or block by block as around a ring."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Modes of `sparse_mode`: the mask as it is, whole, or the causal one of 2048 x 2048 for any length.
_WHOLE = (0, 1)
_FROM_THE_START, _FROM_THE_END = 2, 3
# A band, which is the causal mask where it reaches far enough back and not forward.
_BAND = 4
# What softmax is computed from is handed out this many times over.
_COPIES = 8


def npu_fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    sparse_mode: int = 0,
    actual_seq_qlen: Sequence[int] | None = None,
    pre_tockens: int = 2**31 - 1,
    next_tockens: int = 2**31 - 1,
    **more: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
    """Attention of (sequence, batch, heads x size); True in the mask leaves out.

    Or of (tokens, heads, size), TND: sequences one after the other, of which `actual_seq_qlen` has the ends;
    each attends to itself alone, and after the last there are zeros. Of the rest that is returned only the
    attention is right then.

    Returns it, the maxima and the sums of softmax (batch, heads, sequence, 8), nothing, and the seed, the
    offset and the number of what dropout has drawn. A window (`pre_tockens`, `next_tockens`) has to be as
    long as the sequence: it is not looked at but for a band.
    """
    if sparse_mode == _BAND:
        if next_tockens or pre_tockens < len(query):
            raise NotImplementedError(f"a band of {pre_tockens} and {next_tockens}")
        sparse_mode = _FROM_THE_END
    if input_layout == "TND":
        ends = list(actual_seq_qlen or ())
        padding = torch.zeros_like(query[ends[-1] :].flatten(1).unsqueeze(1))  # of no sequence
        sequences = [
            npu_fusion_attention(
                *(x[start:end].flatten(1).unsqueeze(1) for x in (query, key, value)),
                head_num,
                "SBH",
                pse=pse,
                atten_mask=atten_mask,
                scale=scale,
                keep_prob=keep_prob,
                sparse_mode=sparse_mode,
            )
            for start, end in zip([0, *ends], ends, strict=False)
        ]
        return torch.cat([*(outputs[0] for outputs in sequences), padding]).reshape(query.shape), *sequences[
            0
        ][1:]
    key, value = _for_each_head(query, key, value, head_num)
    _require(query, key, input_layout, pse)
    queries, keys, values = (_by_head(x, head_num) for x in (query, key, value))
    scores = _scores(queries, keys, atten_mask, scale, sparse_mode)
    largest = scores.detach().amax(-1, keepdim=True)
    weights = torch.exp(scores - largest)
    total = weights.sum(-1, keepdim=True)
    weights = weights / total
    seed = int(torch.randint(2**31, ())) if keep_prob < 1 else 0
    context = _together(torch.bmm(weights * _kept(weights, seed, keep_prob), values), query)
    kept = [
        x.detach().view(-1, head_num, len(query), 1).expand(-1, -1, -1, _COPIES).clone()
        for x in (largest, total)
    ]
    return context, *kept, torch.empty(0), seed, 0, weights.numel()


def npu_fusion_attention_grad(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dy: torch.Tensor,
    head_num: int,
    input_layout: str,
    *,
    softmax_max: torch.Tensor,
    softmax_sum: torch.Tensor,
    attention_in: torch.Tensor,
    pse: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    sparse_mode: int = 0,
    seed: int = 0,
    **more: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value; key and value may be a part of the keys under the softmax.

    `softmax_max`, `softmax_sum` and `attention_in` belong to the whole, `seed` to the part.
    """
    _require(query, key, input_layout, pse)
    queries, keys, values, gradient, attention = (
        _by_head(x, head_num) for x in (query, key, value, dy, attention_in)
    )
    largest, total = (x[..., :1].reshape(-1, len(query), 1) for x in (softmax_max, softmax_sum))
    weights = torch.exp(_scores(queries, keys, atten_mask, scale_value, sparse_mode) - largest) / total
    kept = _kept(weights, seed, keep_prob)
    of_values = torch.bmm((weights * kept).transpose(1, 2), gradient)
    of_weights = torch.bmm(gradient, values.transpose(1, 2)) * kept
    of_scores = weights * (of_weights - (gradient * attention).sum(-1, keepdim=True)) * scale_value
    of_queries, of_keys = torch.bmm(of_scores, keys), torch.bmm(of_scores.transpose(1, 2), queries)
    return _together(of_queries, query), _together(of_keys, key), _together(of_values, value)


def _require(query: torch.Tensor, key: torch.Tensor, input_layout: str, pse: torch.Tensor | None) -> None:
    if input_layout != "SBH" or pse is not None or query.shape[-1] != key.shape[-1]:
        raise NotImplementedError("another layout than SBH, position encodings, or shared heads")


def _for_each_head(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_num: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of (sequence, batch, heads x size), repeated for queries with shared keys."""
    size = query.shape[-1] // head_num
    shared = head_num * size // key.shape[-1]
    if shared == 1 or query.dim() != 3:
        return key, value
    key, value = (x.unflatten(-1, (-1, size)).repeat_interleave(shared, 2).flatten(2) for x in (key, value))
    return key, value


def _by_head(x: torch.Tensor, head_num: int) -> torch.Tensor:
    """(sequence, batch, heads x size) as (batch x heads, sequence, size), in float32."""
    return x.reshape(len(x), x.shape[1] * head_num, -1).transpose(0, 1).float()


def _together(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).reshape(*like.shape[:2], -1).to(like.dtype)


def _scores(
    queries: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor | None, scale: float, sparse_mode: int
) -> torch.Tensor:
    scores = torch.baddbmm(torch.zeros(()), queries, keys.transpose(1, 2), beta=0.0, alpha=scale)
    if sparse_mode in (_FROM_THE_START, _FROM_THE_END):
        first = keys.shape[1] - queries.shape[1] if sparse_mode == _FROM_THE_END else 0
        mask = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + first)
    elif sparse_mode not in _WHOLE:
        raise NotImplementedError(f"sparse_mode {sparse_mode}")
    return scores if mask is None else scores.masked_fill(mask, -10000.0)


def _kept(weights: torch.Tensor, seed: int, keep_prob: float) -> torch.Tensor | float:
    """Return the dropout factors of the weights; equal for equal seeds."""
    if keep_prob == 1:
        return 1.0
    drawn = torch.rand(weights.shape, generator=torch.Generator().manual_seed(seed))
    return (drawn < keep_prob) / keep_prob
