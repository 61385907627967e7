"""Adjusts logits by requests' parameters, in vLLM's order, before a token is chosen.

Except for masks, each adjustment concerns few tokens of a row: tokens listed in a table or present in the
sequence. It gathers their logits and scatters the results back, at little cost compared with a pass over the
vocabulary. A token listed twice is no problem: both entries compute the same value, so the order of writes
does not matter.
"""

import functools

import torch

from worker_svc.sampling.state import FOREVER, SamplingOps, SamplingState


def adjust_logits(
    state: SamplingState,
    needs: SamplingOps,
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    adjusted: torch.Tensor,
) -> torch.Tensor:
    """Applies masks, bad words, `min_tokens`, `logit_bias` and penalties, in this order.

    Args:
        state: the slots' sampling parameters.
        needs: which adjustments to compute.
        logits: float32 [rows, vocab]; not modified.
        rows: int64 [rows], the slot of each row.
        positions: int64 [rows], the position of the token to sample: the number of tokens before it.
        adjusted: float32 [rows, vocab], the output buffer.

    Returns:
        `adjusted`; -inf for tokens that must not be sampled.
    """
    adjusted.copy_(logits)
    if needs.masks:
        _mask(state, adjusted, rows)
    if needs.bans:
        _ban(state, needs, adjusted, rows, positions)
    if needs.biases:
        ids, values = state.bias_ids[:, : needs.biases][rows], state.bias_values[:, : needs.biases][rows]
        adjusted.scatter_add_(1, ids, values)
    if needs.history:
        _penalize(state, needs, adjusted, rows, positions)
    return adjusted


def _mask(state: SamplingState, logits: torch.Tensor, rows: torch.Tensor) -> None:
    """Sets logits to -inf where the row's mask has a 0 bit."""
    words = state.allowed[rows]
    added = torch.nn.functional.embedding(words.view(torch.uint8).int(), _bits_of_bytes(logits.device))
    logits.add_(added.view(logits.shape[0], -1)[:, : logits.shape[1]])


@functools.cache
def _bits_of_bytes(device: torch.device) -> torch.Tensor:
    """Returns the value to add to a logit for each byte and bit, lowest bit first: float32 [256, 8]."""
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)
    return torch.where(bits & 1 == 1, 0.0, -torch.inf)


def _ban(
    state: SamplingState,
    needs: SamplingOps,
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Bans the last token of each begun bad word, then early end tokens.

    Early end tokens stay allowed in a row without any other token.
    """
    tokens, until = state.ban_tokens[:, : needs.bans][rows], state.ban_until[:, : needs.bans][rows]
    active = positions[:, None] < until
    if needs.ban_prefix:
        width = needs.ban_prefix
        # Prefixes are right-aligned, like the tokens that they are compared with; -1 matches any token.
        prefix = state.ban_prefix[:, : needs.bans, -width:][rows]
        places = positions[:, None] - width + torch.arange(width, device=rows.device)
        last = state.tokens[rows[:, None], places.clamp_(min=0)]
        matches = ((prefix == last[:, None, :]) | (prefix < 0)).all(dim=-1)
        start = positions[:, None] - state.ban_prefix_len[:, : needs.bans][rows]
        active &= matches & (start >= state.parameters.prompt_len[rows][:, None])
    early = until < FOREVER
    logits.scatter_add_(1, tokens, torch.where(active & ~early, -torch.inf, 0.0))
    before = logits.gather(1, tokens)
    logits.scatter_add_(1, tokens, torch.where(active & early, -torch.inf, 0.0))
    none_left = logits.amax(dim=-1, keepdim=True) == -torch.inf
    logits.scatter_(1, tokens, torch.where(none_left, before, logits.gather(1, tokens)))


def _penalize(
    state: SamplingState,
    needs: SamplingOps,
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Applies the repetition penalty (prompt and output), then frequency and presence penalties (output)."""
    known = state.tokens[:, : needs.history][rows]
    seen = torch.arange(needs.history, device=rows.device) < positions[:, None]
    ids = torch.where(seen, known, known[:, :1])
    counts = state.counts.view(-1)[rows[:, None] * logits.shape[1] + ids]
    was = logits.gather(1, ids)
    repetition = state.parameters.repetition[rows][:, None]
    value = torch.where(was > 0, was / repetition, was * repetition)
    value -= state.parameters.frequency[rows][:, None] * counts
    value -= state.parameters.presence[rows][:, None] * (counts > 0)
    logits.scatter_(1, ids, value)
