"""The most probable token of each row."""

import torch

# The first pass computes the maximum of each block, which processors do many times faster than finding its
# position.
_BLOCK = 128


def argmax_rows(logits: torch.Tensor) -> torch.Tensor:
    """Returns the same as `logits.argmax(dim=-1)`, faster.

    Of equal maxima the first counts; NaN counts as the largest value.

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
    # Positions past the end repeat the last token; argmax takes its first occurrence.
    places = (start + torch.arange(_BLOCK, device=logits.device)).clamp_(max=vocab - 1)
    found: torch.Tensor = start[:, 0] + logits.gather(1, places).argmax(dim=-1)
    return found
