"""What sampling takes of a device's memory, whatever requests ask for."""

from worker_svc.sampling.state import MAX_BAN_TOKENS, MAX_BANS, MAX_BIASES
from worker_svc.sampling.workspace import WORKSPACE_BYTES

# Of each element, at most, beside the workspace.
_MASK = 4 + 1  # [rows, vocab]: what is added to logits, and the masks' bytes as indices
_DRAW = 8  # the masses again, where the vocabulary is no multiple of a block
_REPORT = (
    4 + 1 + 8
)  # exponentials, what is likelier than the token, and what the search for the likeliest takes
_BANS = 4 + 8  # [rows, bans, tokens]: prefixes and comparisons
_BIASES = 8 + 4 + 8  # [rows, biases]
_HISTORY = 6 * 8 + 4 * 4  # [rows, longest]: tokens, places, counts and the logits before, between and after


def state_bytes(num_slots: int, vocab_size: int) -> int:
    """Memory of the tables and counts of so many slots."""
    masks = 4 * -(-vocab_size // 32)
    bans = MAX_BANS * (8 + 8 + 4 * MAX_BAN_TOKENS)
    return (num_slots + 1) * (4 * vocab_size + masks + MAX_BIASES * (8 + 4) + bans)


def sampling_bytes(rows: int, vocab_size: int, longest: int) -> int:
    """Memory that a step's choice computes in: the workspace, and what comes and goes, of which the largest counts.

    Args:
        rows: of the largest step.
        vocab_size: of a row of logits.
        longest: tokens of the longest sequence.
    """
    passing = (
        vocab_size * max(_MASK, _DRAW, _REPORT),
        MAX_BANS * MAX_BAN_TOKENS * _BANS,
        MAX_BIASES * _BIASES,
        longest * _HISTORY,
    )
    return rows * vocab_size * WORKSPACE_BYTES + rows * max(passing)
