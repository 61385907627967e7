"""One step's choice of tokens."""

import torch

from worker_svc.sampling.adjust import adjust
from worker_svc.sampling.cut import cut, masses
from worker_svc.sampling.draw import draw, uniform
from worker_svc.sampling.state import Needs, SamplingState


def sample(
    state: SamplingState, needs: Needs, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses one token a row, and counts it where that matters.

    Args:
        state: the slots'.
        needs: what to compute; at least what the rows asked for. Together with the tensors' shapes, this decides what is done.
        logits: float32 [rows, vocab]; not changed.
        rows: int64 [rows], the rows' slots, padding included.
        positions: int64 [rows], the position that each sampled token will have in its sequence.

    Returns:
        The tokens, int64 [rows], and the same for telling others: -1 where no token at all was allowed.
    """
    adjusted = adjust(state, needs, logits, rows, positions) if needs.adjusts else logits
    chosen = _choose(state, needs, adjusted, rows, positions) if needs.random else adjusted.argmax(dim=-1)
    if needs.history:
        state.count(rows, chosen)
    if not needs.adjusts:
        return chosen, chosen
    return chosen, torch.where(adjusted.amax(dim=-1) == -torch.inf, -1, chosen)


def kept_masses(
    state: SamplingState, needs: Needs, adjusted: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """What is drawn from, after temperature and filters: int64 [rows, vocab], in proportion to the tokens' probabilities.

    Args:
        state: the slots'.
        needs: which filters are looked at.
        adjusted: float32 [rows, vocab].
        rows: int64 [rows], the rows' slots.
    """
    temperature = state.temperature[rows]
    scaled = adjusted / torch.where(temperature == 0, 1.0, temperature)[:, None]
    # A row of which nothing is allowed has no largest logit.
    best = scaled.amax(dim=-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).min)
    weights = scaled.sub_(best).exp_()
    return cut(
        weights,
        masses(weights),
        state.min_p[rows] if needs.min_p else None,
        state.top_k[rows] if needs.top_k else None,
        state.top_p[rows] if needs.top_p else None,
    )


def _choose(
    state: SamplingState, needs: Needs, adjusted: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    drawn = draw(kept_masses(state, needs, adjusted, rows), uniform(state.seed[rows], positions))
    if not needs.greedy:
        return drawn
    return torch.where(state.temperature[rows] == 0, adjusted.argmax(dim=-1), drawn)
