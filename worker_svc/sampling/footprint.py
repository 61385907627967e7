"""The device memory that sampling takes, whatever requests ask for."""

from worker_svc.sampling.state import MAX_BAN_TOKENS, MAX_BANS, MAX_BIASES
from worker_svc.sampling.workspace import WORKSPACE_BYTES

# Bytes per element of temporary tensors beside the workspace.
_MASK = 4 + 1  # [rows, vocab]: values added to logits, and the masks' bytes as indices
_DRAW = 8  # [rows, vocab]: a padded copy of the masses, where the vocabulary is not a multiple of a block
_LOGPROBS = 4 + 1 + 8  # [rows, vocab]: exponentials, the comparison for ranks, and temporaries of topk
_BANS = 4 + 8  # [rows, bans, tokens]: prefixes and comparisons
_BIASES = 8 + 4 + 8  # [rows, biases]
_HISTORY = 6 * 8 + 4 * 4  # [rows, longest]: tokens, places, counts and the logits before, between and after


def state_bytes(num_slots: int, vocab_size: int) -> int:
    """Returns the bytes of the tables and counts of `num_slots` slots."""
    masks = 4 * -(-vocab_size // 32)
    bans = MAX_BANS * (8 + 8 + 4 * MAX_BAN_TOKENS)
    return (num_slots + 1) * (4 * vocab_size + masks + MAX_BIASES * (8 + 4) + bans)


def sampling_bytes(rows: int, vocab_size: int, longest: int) -> int:
    """Returns the bytes that sampling a step takes: the workspace and the largest temporary tensors.

    Args:
        rows: rows of the largest step.
        vocab_size: width of the logits.
        longest: tokens of the longest sequence.
    """
    temporary = (
        vocab_size * max(_MASK, _DRAW, _LOGPROBS),
        MAX_BANS * MAX_BAN_TOKENS * _BANS,
        MAX_BIASES * _BIASES,
        longest * _HISTORY,
    )
    return rows * vocab_size * WORKSPACE_BYTES + rows * max(temporary)
