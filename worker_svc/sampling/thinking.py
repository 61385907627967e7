"""Ends thoughts that have used up their budgets.

The state of a slot is the position at which its thought must end and the progress of that end. It follows
from the tokens alone, so a device that runs ahead advances it without the host, and a replay restores it from
the tokens of its admission.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from protos.limits import MAX_MARKER_TOKENS
from protos.steps import Admission
from protos.triptych.v1 import common_pb2
from worker_svc.devices.base import upload
from worker_svc.pending_step import NOT_FINITE

_NEVER: Final = torch.iinfo(torch.int64).max
_ANY: Final = -1
# The rows of `_patterns` before those of the beginnings of `close_ids`.
_START, _END, _BEGINNINGS = range(3)


class Endings(NamedTuple):
    """The tokens that a step writes to end thoughts."""

    due: torch.Tensor
    """bool [rows]: whether a row gets its token."""
    tokens: torch.Tensor
    """int64 [rows]."""

    def of(self, index: torch.Tensor) -> "Endings":
        """Returns the same for some rows, int64 [rows]."""
        return Endings(self.due[index], self.tokens[index])

    def over(
        self, drawn: Sequence[torch.Tensor], logits: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns drawn tokens without and with marks, int64 [rows], with these tokens in their places.

        With `logits`, float32 [rows, vocab], a row keeps its token if a grammar forbids the other (-inf).
        """
        due = self.due
        if logits is not None:
            due = due & (logits.gather(1, self.tokens[:, None])[:, 0] != -torch.inf)
        reported = torch.where(due & (drawn[-1] != NOT_FINITE), self.tokens, drawn[-1])
        return torch.where(due, self.tokens, drawn[0]), reported


class ThinkingBudgets:
    """The budgets of slots. The tables below exist only after `allocate`; the last row is for padding."""

    _state: torch.Tensor
    """int64 [slots + 1, 5]: the position at which a thought must end, `_NEVER` outside of thoughts; how many
    `close_ids` are written; the tokens of the budget; the number of `close_ids`, and of those up to
    `end_ids`."""
    _patterns: torch.Tensor
    """int64 [slots + 1, 2 + width, width]: `start_ids`, `end_ids` and the beginnings of `close_ids`, of 1 to
    `width` tokens, all right-aligned; `_ANY` matches any token."""
    _lengths: torch.Tensor
    """int64 [slots + 1, 2 + width]: the number of tokens of each; `_NEVER` for none."""
    _close: torch.Tensor
    """int64 [slots + 1, width]."""

    def __init__(self, tokens: torch.Tensor, prompt_len: torch.Tensor) -> None:
        """Starts without budgets.

        Args:
            tokens: int64 [slots + 1, longest + 1], the slots' token ids; the batch keeps them up to date.
            prompt_len: int64 [slots + 1], the same of the lengths of their prompts.
        """
        self._tokens = tokens
        self._prompt_len = prompt_len
        self._slots: set[int] = set()
        self._is_allocated = False
        # Tokens of the longest marker so far.
        self._width = 1

    def allocate(self) -> None:
        """Allocates the tables, unless they exist."""
        if self._is_allocated:
            return
        self._is_allocated = True
        rows, width, device = len(self._tokens), MAX_MARKER_TOKENS, self._tokens.device
        self._state = torch.zeros((rows, 5), dtype=torch.int64, device=device)
        self._state[:, 0] = _NEVER
        self._patterns = torch.full((rows, 2 + width, width), _ANY, device=device)
        self._lengths = torch.full((rows, 2 + width), _NEVER, device=device)
        self._close = torch.zeros((rows, width), dtype=torch.int64, device=device)
        self._counts = torch.arange(1, width + 1, device=device)

    def set(self, request: Admission) -> None:
        """Stores the budget of a request, as its tokens leave it, or that it has none."""
        slot = request.slot
        if not request.sampling.HasField("thinking_budget"):
            if slot in self._slots:
                self._slots.discard(slot)
                self._state[slot, 0] = _NEVER
                self._lengths[slot] = _NEVER
            return
        self.allocate()
        self._slots.add(slot)
        budget = request.sampling.thinking_budget
        close, width = list(budget.close_ids), MAX_MARKER_TOKENS
        patterns = [list(budget.start_ids), list(budget.end_ids)]
        patterns += [close[:count] for count in range(1, len(close) + 1)]
        self._width = max(self._width, *map(len, patterns))
        patterns += [[]] * (2 + width - len(patterns))
        rows = [
            *_state_of(budget, request.token_ids, request.prompt_len), budget.tokens, len(close), _essential(budget),
            *(token for each in patterns for token in (*[_ANY] * (width - len(each)), *each)),
            *(len(each) or _NEVER for each in patterns),
            *close, *[0] * (width - len(close)),
        ]  # fmt: skip
        state, pattern, length, close_row = upload(rows, self._tokens.device, torch.int64).split(
            [5, (2 + width) * width, 2 + width, width]
        )
        self._state[slot] = state
        self._patterns[slot] = pattern.view(2 + width, width)
        self._lengths[slot] = length
        self._close[slot] = close_row

    def limit_any(self, slots: Sequence[int]) -> bool:
        """Whether any of the slots has a budget."""
        return bool(self._slots) and not self._slots.isdisjoint(slots)

    def advance(self, rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes up each row's last token. Call it once for each new token, before the next one is chosen.

        Args:
            rows: int64 [rows], the slot of each row.
            positions: int64 [rows], the position of the token to choose: the number of tokens before it.

        Returns:
            The fields of `Endings`.
        """
        return self._advance(rows, positions, self._width)

    def advance_any(self, rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Does the same for markers of any length, as captured steps must."""
        return self._advance(rows, positions, MAX_MARKER_TOKENS)

    def _advance(
        self, rows: torch.Tensor, positions: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        until, written, tokens, close_len, essential = self._state[rows].unbind(1)
        places = positions[:, None] - self._counts[:width].flip(0)
        last = self._tokens[rows[:, None], places.clamp_(min=0)]
        patterns = self._patterns[:, : _BEGINNINGS + width, -width:][rows]
        found = ((patterns == last[:, None]) | (patterns == _ANY)).all(dim=-1)
        # Markers are new tokens only. The prompt may end like one.
        lengths = self._lengths[:, : _BEGINNINGS + width][rows]
        found &= lengths <= (positions - self._prompt_len[rows])[:, None]
        begun = (found[:, _BEGINNINGS:] * self._counts[:width]).amax(dim=-1)
        # An end inside of `close_ids` does not keep the rest from following, but a grammar may.
        ends = found[:, _END] & ~((positions > until) & (begun > 0))
        ends |= (positions >= until) & (begun == close_len)
        ends |= (written >= essential) & (begun != written + 1)
        opened = torch.where(found[:, _START], positions + tokens, _NEVER)
        until = torch.where(until == _NEVER, opened, until.masked_fill(ends, _NEVER))
        due = positions >= until
        self._state[rows, :2] = torch.stack([until, begun * due], dim=1)
        index = begun.clamp(max=MAX_MARKER_TOKENS - 1)[:, None]
        return due, self._close[rows].gather(1, index)[:, 0]


def thinking_bytes(num_slots: int) -> int:
    """Returns the bytes of the tables of `num_slots` slots."""
    return 8 * (num_slots + 1) * (5 + (2 + MAX_MARKER_TOKENS) * (MAX_MARKER_TOKENS + 1) + MAX_MARKER_TOKENS)


def _essential(budget: common_pb2.ThinkingBudget) -> int:
    """Returns how many `close_ids` include `end_ids`; more than there are if they never do."""
    close, end = tuple(budget.close_ids), tuple(budget.end_ids)
    sizes = range(len(end), len(close) + 1)
    return next((size for size in sizes if close[size - len(end) : size] == end), len(close) + 1)


def _state_of(budget: common_pb2.ThinkingBudget, known: Sequence[int], prompt_len: int) -> tuple[int, int]:
    """Returns the first two columns of a sequence's state, before its last token is taken up."""
    start, end, close = (tuple(ids) for ids in (budget.start_ids, budget.end_ids, budget.close_ids))
    tokens, essential = tuple(known), _essential(budget)

    def found(marker: tuple[int, ...], stop: int) -> bool:
        size = len(marker)
        return 0 < size <= stop - prompt_len and tokens[stop - size : stop] == marker

    def begun_at(stop: int) -> int:
        return next((size for size in range(len(close), 0, -1) if found(close[:size], stop)), 0)

    until, written = prompt_len + budget.tokens if budget.open else _NEVER, 0
    for position in range(prompt_len + 1, len(tokens)):
        if until == _NEVER:
            until = position + budget.tokens if found(start, position) else _NEVER
        elif position < until:
            until = _NEVER if found(end, position) else until
        else:
            begun = begun_at(position)
            ends = found(end, position) and (position == until or not begun)
            if ends or begun == len(close) or (written >= essential and begun != written + 1):
                until = _NEVER
        written = begun_at(position) if position >= until else 0
    return until, written
