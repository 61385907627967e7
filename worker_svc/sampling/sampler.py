"""One step's choice of tokens."""

import torch

from worker_svc.sampling.adjust import adjust_logits
from worker_svc.sampling.argmax import argmax_rows
from worker_svc.sampling.draw import draw, uniform
from worker_svc.sampling.filters import apply_filters
from worker_svc.sampling.state import Needs, Reach, SamplingState
from worker_svc.sampling.workspace import Tile


def sample(
    state: SamplingState,
    needs: Needs,
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    *,
    attempt: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses one token a row. Whoever takes it counts it (``SamplingState.count``).

    A grammar's mask belongs on the logits before: what is -inf there stays so. A row whose token the grammar refuses may also be masked
    then and drawn again, under another ``attempt``: as its numbers are new ones, the token comes with the same probability as under a mask
    from the start (not with filters, which must see the mask first).

    Args:
        state: the slots'.
        needs: what to compute; at least what the rows asked for. Together with the tensors' shapes, this decides what is done.
        logits: float32 [rows, vocab]; not changed.
        rows: int64 [rows], the rows' slots, padding included.
        positions: int64 [rows], the position that each sampled token will have in its sequence.
        attempt: which draw of the same token this is.

    Returns:
        The tokens, int64 [rows], and the same for telling others: -1 where no token at all was allowed.
    """
    if needs.none:
        chosen = argmax_rows(logits)
        return chosen, chosen
    workspace = state.workspace(logits.shape[0])
    adjusted = logits
    if needs.adjusts:
        adjusted = adjust_logits(state, needs, logits, rows, positions, workspace.logits(logits.shape[0]))
    # First, as the tiles' memory is that of the adjusted logits.
    chosen = argmax_rows(adjusted)
    best = adjusted.gather(1, chosen[:, None])
    if needs.random:
        numbers = uniform(state.seed[rows], positions, attempt)
        parts = [
            draw(filtered_masses(state, needs, adjusted[part], best[part], rows[part], tile), numbers[part])
            for part, tile in workspace.tiles(logits.shape[0])
        ]
        drawn = torch.cat(parts)
        chosen = torch.where(state.temperature[rows] == 0, chosen, drawn) if needs.greedy else drawn
    if not needs.adjusts:
        return chosen, chosen
    return chosen, torch.where(best[:, 0] == -torch.inf, -1, chosen)


def filtered_masses(
    state: SamplingState,
    needs: Needs,
    adjusted: torch.Tensor,
    best: torch.Tensor,
    rows: torch.Tensor,
    tile: Tile,
) -> torch.Tensor:
    """What is drawn from, after temperature and filters: int64 [rows, vocab], in proportion to the tokens' probabilities.

    Args:
        state: the slots'.
        needs: which filters are looked at.
        adjusted: float32 [rows, vocab]; overwritten if it is the tile's.
        best: float32 [rows, 1], the largest of each row.
        rows: int64 [rows], the rows' slots.
        tile: of as many rows; the result is in it.
    """
    temperature = state.temperature[rows]
    temperature = torch.where(temperature == 0, 1.0, temperature)[:, None]
    # A row of which nothing is allowed has no largest logit.
    largest = (best / temperature).clamp_(min=torch.finfo(torch.float32).min)
    torch.div(adjusted, temperature, out=tile.weights).sub_(largest).exp_()
    return apply_filters(
        tile,
        state.min_p[rows] if needs.min_p else None,
        state.top_k[rows] if needs.top_k else None,
        state.top_p[rows] if needs.top_p else None,
        few=needs.top_k == Reach.FEW,
        nucleus_in_few=needs.top_p == Reach.FEW,
    )
