"""Log-probabilities: of the logits as the model made them, before anything is done to them."""

from collections.abc import Sequence

import torch

from worker_svc.plans.step_plan import Logprobs

NUM_TOP = 20
"""Likeliest tokens that are found for each row, whoever asks: more than a chat client can ask for, few enough to be cheap."""


def compute_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """All there is to say of each row, as one tensor, so that it is fetched from the device at once.

    Args:
        logits: float32 [rows, vocab].
        tokens: int64 [rows], the chosen tokens.

    Returns:
        float64 [rows, 2 + 2 * top]: the token's log-probability and rank, the likeliest tokens, best first, and their log-probabilities.
        Token ids are exact in it.
    """
    best = logits.amax(dim=-1, keepdim=True)
    total = (logits - best).exp_().sum(dim=-1, keepdim=True).log_().add_(best)
    own = logits.gather(1, tokens[:, None])
    rank = (logits > own).sum(dim=-1, keepdim=True).add_(1)
    values, ids = logits.topk(min(NUM_TOP, logits.shape[-1]), dim=-1)
    return torch.cat([(own - total).double(), rank.double(), ids.double(), (values - total).double()], dim=-1)


def unpack_logprobs(rows: torch.Tensor, counts: Sequence[int | None]) -> list[Logprobs | None]:
    """The rows of a :func:`report` as they are sent.

    Args:
        rows: what ``report`` returned.
        counts: for each of the first rows, how many of the likeliest tokens it asked for; ``None`` for no log-probabilities.
    """
    found: list[Logprobs | None] = []
    for count, (logprob, rank, *top) in zip(counts, rows[: len(counts)].tolist(), strict=True):
        if count is None:
            found.append(None)
            continue
        half = len(top) // 2
        count = min(count, half)  # noqa: PLW2901 - a small vocabulary has no more
        found.append(Logprobs(logprob, int(rank), list(map(int, top[:count])), top[half : half + count]))
    return found
