"""Chooses a step's tokens and computes their log-probabilities."""

from collections.abc import Sequence

import torch

from protos.limits import MAX_LOGPROBS
from protos.triptych.v1 import common_pb2
from worker_svc.devices.base import is_host
from worker_svc.pending_step import NO_TOKEN, NOT_FINITE
from worker_svc.sampling.adjust import adjust_logits
from worker_svc.sampling.draw import draw, draw_keys
from worker_svc.sampling.filters import apply_filters
from worker_svc.sampling.state import FilterScope, SamplingOps, SamplingState
from worker_svc.sampling.workspace import Tile

# The first pass computes the maximum of each block, which a GPU does many times faster than finding its
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
    if is_host(logits.device):
        # NumPy's single thread is done before PyTorch has woken a second one.
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return argmax_of_blocks(logits)


def argmax_of_blocks(logits: torch.Tensor) -> torch.Tensor:
    """Returns the same as `argmax_rows`, block by block, as GPUs do it fastest."""
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


def mark_not_finite(tokens: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """Returns the tokens, int64 [rows], with `NOT_FINITE` where the largest logit is NaN or infinite.

    Args:
        tokens: int64 [rows].
        best: float32 [rows], each row's largest logit, NaN if one is NaN.
    """
    return torch.where(best.abs() < torch.inf, tokens, NOT_FINITE)


def sample(
    state: SamplingState,
    needs: SamplingOps,
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    *,
    attempt: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses a token per row. The caller counts taken tokens (`SamplingState.count`).

    A grammar's mask may be applied to `logits` first: -inf stays -inf. Alternatively, the caller masks a row
    after the grammar rejects its token and draws again with another `attempt`. That draw uses new random
    numbers, so tokens come with the same probability as with the mask from the start. This does not hold for
    rows with filters, which need the mask first.

    Args:
        state: the slots' sampling parameters.
        needs: the work, at least the rows' needs. It and the tensors' shapes determine the operations.
        logits: float32 [rows, vocab]; not modified.
        rows: int64 [rows], the slot of each row, padding included.
        positions: int64 [rows], the position of each sampled token in its sequence.
        attempt: number of earlier draws for the same position.

    Returns:
        Valid tokens, int64 [rows], and the same with a mark where no token was allowed or the logits are not
        finite.
    """
    if needs.none:
        chosen = argmax_rows(logits)
        reported = mark_not_finite(chosen, logits.gather(1, chosen[:, None])[:, 0])
        return chosen, reported
    workspace = state.workspace(logits.shape[0])
    adjusted = logits
    if needs.adjusts:
        adjusted = adjust_logits(state, needs, logits, rows, positions, workspace.logits(logits.shape[0]))
    # Computed before the tiles, which overwrite the adjusted logits.
    chosen = argmax_rows(adjusted)
    best = adjusted.gather(1, chosen[:, None])
    if needs.random:
        keys = draw_keys(state.parameters.seed[rows], positions, attempt)
        parts = [
            draw(filtered_masses(state, needs, adjusted[part], best[part], rows[part], tile), keys[part])
            for part, tile in workspace.tiles(logits.shape[0])
        ]
        drawn = torch.cat(parts)
        chosen = (
            torch.where(state.parameters.temperature[rows] == 0, chosen, drawn) if needs.greedy else drawn
        )
    reported = mark_not_finite(chosen, best[:, 0])
    if needs.adjusts:
        reported = torch.where(best[:, 0] == -torch.inf, NO_TOKEN, reported)
    # A draw from masses that are not finite may lie beyond the vocabulary.
    return reported.clamp(min=0), reported


def filtered_masses(
    state: SamplingState,
    needs: SamplingOps,
    adjusted: torch.Tensor,
    best: torch.Tensor,
    rows: torch.Tensor,
    tile: Tile,
) -> torch.Tensor:
    """Applies temperature and filters. Returns masses proportional to probabilities: int64 [rows, vocab].

    Args:
        state: the slots' sampling parameters.
        needs: which filters to apply.
        adjusted: float32 [rows, vocab], the adjusted logits; overwritten if they are the tile's own.
        best: float32 [rows, 1], the largest logit of each row.
        rows: int64 [rows], the slot of each row.
        tile: memory for as many rows; it holds the result.
    """
    temperature = state.parameters.temperature[rows]
    temperature = torch.where(temperature == 0, 1.0, temperature)[:, None]
    # A row without any allowed token has -inf as its largest logit.
    largest = (best / temperature).clamp_(min=torch.finfo(torch.float32).min)
    torch.div(adjusted, temperature, out=tile.weights).sub_(largest).exp_()
    return apply_filters(
        tile,
        state.parameters.min_p[rows] if needs.min_p else None,
        state.parameters.top_k[rows] if needs.top_k else None,
        state.parameters.top_p[rows] if needs.top_p else None,
        few=needs.top_k == FilterScope.FEW,
        nucleus_in_few=needs.top_p == FilterScope.FEW,
    )


def compute_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Computes the log-probabilities of each row as a tensor, for a single copy to the host.

    Args:
        logits: float32 [rows, vocab].
        tokens: int64 [rows], the chosen tokens.

    Returns:
        float64 [rows, 2 + 2 * top]: the token's log-probability and rank, the most probable tokens, best
        first, and their log-probabilities. float64 holds token ids exactly.
    """
    best = logits.amax(dim=-1, keepdim=True)
    total = (logits - best).exp_().sum(dim=-1, keepdim=True).log_().add_(best)
    own = logits.gather(1, tokens[:, None])
    rank = (logits > own).sum(dim=-1, keepdim=True).add_(1)
    values, ids = logits.topk(min(MAX_LOGPROBS, logits.shape[-1]), dim=-1)
    return torch.cat([(own - total).double(), rank.double(), ids.double(), (values - total).double()], dim=-1)


def unpack_logprobs(
    rows: torch.Tensor, counts: Sequence[int | None]
) -> list[common_pb2.TokenLogprobs | None]:
    """Converts rows of `compute_logprobs` to the form in which results carry them.

    Args:
        rows: the result of `compute_logprobs`.
        counts: how many of the most probable tokens each of the first rows asked for; `None` for no
            log-probabilities.
    """
    unpacked: list[common_pb2.TokenLogprobs | None] = []
    for count, (logprob, rank, *top) in zip(counts, rows[: len(counts)].tolist(), strict=True):
        if count is None:
            unpacked.append(None)
            continue
        half = len(top) // 2
        count = min(count, half)  # noqa: PLW2901 - a small vocabulary has fewer
        unpacked.append(
            common_pb2.TokenLogprobs(
                logprob=logprob,
                rank=int(rank),
                top_token_ids=list(map(int, top[:count])),
                top_logprobs=top[half : half + count],
            )
        )
    return unpacked
