"""Log-probabilities from the model's own logits, before any adjustment or filter."""

from collections.abc import Sequence

import torch

from protos.limits import MAX_LOGPROBS
from protos.triptych.v1 import common_pb2


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
