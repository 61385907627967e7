"""The most probable token of each row."""

import torch

# Within a block only the largest value is looked for, which processors do many times faster than they find its place.
_BLOCK = 128


def argmax_rows(logits: torch.Tensor) -> torch.Tensor:
    """The place of each row's largest value, the first of equal ones: what ``logits.argmax(dim=-1)`` returns, where NaN counts as the largest.

    Args:
        logits: float32 [rows, vocab].

    Returns:
        int64 [rows].
    """
    vocab = logits.shape[-1]
    count = vocab // _BLOCK
    best = logits[:, : count * _BLOCK].unflatten(-1, (count, _BLOCK)).amax(dim=-1)
    if vocab % _BLOCK:
        best = torch.cat([best, logits[:, count * _BLOCK :].amax(dim=-1, keepdim=True)], dim=-1)
    start = best.argmax(dim=-1, keepdim=True) * _BLOCK
    # Behind the end stands the last token again: it comes first where it is.
    places = (start + torch.arange(_BLOCK, device=logits.device)).clamp_(max=vocab - 1)
    found: torch.Tensor = start[:, 0] + logits.gather(1, places).argmax(dim=-1)
    return found
