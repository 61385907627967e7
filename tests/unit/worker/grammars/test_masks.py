"""Masks set the logits of forbidden tokens to -inf."""

import torch

from worker_svc.grammars.masks import Masks


def test_masks_remove_forbidden_tokens() -> None:
    """Only the given rows change; the CPU kernel and plain tensor operations agree."""
    masks = Masks(3, 70, torch.device("cpu"))
    masks.rows.random_(-(2**31), 2**31)
    logits = torch.randn(3, 70)
    expected = logits.clone()
    for row in (0, 2):
        for token in range(70):
            if not int(masks.rows[row, token // 32]) >> (token % 32) & 1:
                expected[row, token] = -torch.inf
    by_tensors = logits.clone()
    masks.apply(logits, [0, 2])
    assert torch.equal(logits, expected)
    masks._has_kernel = False
    masks.apply(by_tensors, [0, 2])
    assert torch.equal(by_tensors, expected)
