"""Ends thoughts that have used up their budgets.

The state of a slot is the position at which its thought must end and the progress of that end. It follows
from the tokens alone, so a device that runs ahead advances it without the host, in tensors, and a replay
restores it from the tokens of its admission (`_Thought`). Where the tokens are on the host, `_Thought` also
advances it, which costs a few microseconds for each row with a budget.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from protos.limits import MAX_MARKER_TOKENS, MAX_MARKERS
from protos.steps import Admission
from protos.triptych.v1 import common_pb2
from worker_svc.devices.base import is_host, upload
from worker_svc.pending_step import NOT_FINITE

_NEVER: Final = torch.iinfo(torch.int64).max
_ANY: Final = -1
# Rows of `_patterns`.
_STARTS: Final = slice(0, MAX_MARKERS)
_ENDS: Final = slice(MAX_MARKERS, 2 * MAX_MARKERS)
_BEGINNINGS: Final = slice(2 * MAX_MARKERS, 2 * MAX_MARKERS + MAX_MARKER_TOKENS)


class Endings(NamedTuple):
    """The tokens that a step writes to end thoughts."""

    due: torch.Tensor
    """bool [rows]: whether a row gets its token."""
    tokens: torch.Tensor
    """int64 [rows]."""

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


class _Thought:
    """The state of a sequence's thinking."""

    def __init__(self, budget: common_pb2.ThinkingBudget, prompt_len: int) -> None:
        self.tokens = budget.tokens
        self._prompt_len = prompt_len
        self.starts = [list(marker.token_ids) for marker in budget.starts]
        self.ends = [list(marker.token_ids) for marker in budget.ends]
        self.close = list(budget.close_ids)
        """The tokens to write at the end."""
        self.until = prompt_len + budget.tokens if budget.open else _NEVER
        """The position at which the thought must end; `_NEVER` outside of thoughts."""
        self.written = 0
        """How many tokens of `close` are written."""
        sizes = range(1, len(self.close) + 1)
        self.essential = next((size for size in sizes if _ends_with(self.close[:size], self.ends)), _NEVER)
        """How many tokens of `close` include an end of thoughts; `_NEVER`: it has none."""

    def tail(self, position: int) -> slice:
        """Returns the places before `position` that may hold a marker: of new tokens, the last ones."""
        return slice(max(self._prompt_len, position - MAX_MARKER_TOKENS), position)

    def take(self, tail: list[int], position: int) -> None:
        """Takes up the token before `position`, the last one of its `tail`."""
        if self.until == _NEVER:
            if not _ends_with(tail, self.starts):
                return
            self.until, ends = position + self.tokens, False
        else:
            ends = _ends_with(tail, self.ends)
        if position < self.until:
            self.until = _NEVER if ends else self.until
            return
        sizes = range(len(self.close), 0, -1)
        begun = next((size for size in sizes if _ends_with(tail, (self.close[:size],))), 0)
        # An end inside of `close` does not keep the rest from following, but a grammar may.
        ends = ends and (position == self.until or not begun)
        if ends or begun == len(self.close) or (self.written >= self.essential and begun != self.written + 1):
            self.until, begun = _NEVER, 0
        self.written = begun


def _ends_with(tail: Sequence[int], markers: Sequence[list[int]]) -> bool:
    return any(len(marker) <= len(tail) and tail[-len(marker) :] == marker for marker in markers)


class ThinkingBudgets:
    """The budgets of slots.

    Tokens on the host need none of the tables below, which `allocate` makes. Their last row is for padding.
    """

    _state: torch.Tensor
    """int64 [slots + 1, 5]: the position at which a thought must end, `_NEVER` outside of thoughts; how many
    `close_ids` are written; the tokens of the budget; the number of `close_ids`, and of those up to the first
    of `ends`."""
    _patterns: torch.Tensor
    """int64 [slots + 1, patterns, width]: `starts`, `ends` and the beginnings of `close_ids`, of 1 to `width`
    tokens, all right-aligned; `_ANY` matches any token."""
    _lengths: torch.Tensor
    """int64 [slots + 1, patterns]: the number of tokens of each; `_NEVER` for none."""
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
        # Of slots with budgets; kept up to date only without tables.
        self._thoughts: dict[int, _Thought] = {}
        self._has_tables = False

    def allocate(self) -> None:
        """Allocates the tables, unless they exist."""
        if self._has_tables:
            return
        self._has_tables = True
        rows, width, device = len(self._tokens), MAX_MARKER_TOKENS, self._tokens.device
        self._state = torch.zeros((rows, 5), dtype=torch.int64, device=device)
        self._state[:, 0] = _NEVER
        self._patterns = torch.full((rows, _BEGINNINGS.stop, width), _ANY, device=device)
        self._lengths = torch.full((rows, _BEGINNINGS.stop), _NEVER, device=device)
        self._close = torch.zeros((rows, width), dtype=torch.int64, device=device)
        self._counts = torch.arange(1, width + 1, device=device)

    def set(self, request: Admission) -> None:
        """Stores the budget of a request, as its tokens leave it, or that it has none."""
        slot = request.slot
        if not request.sampling.HasField("thinking_budget"):
            if self._thoughts.pop(slot, None) is not None and self._has_tables:
                self._state[slot, 0] = _NEVER
                self._lengths[slot] = _NEVER
            return
        budget, tokens = request.sampling.thinking_budget, list(request.token_ids)
        self._thoughts[slot] = thought = _Thought(budget, request.prompt_len)
        for position in range(request.prompt_len + 1, len(tokens)):
            thought.take(tokens[thought.tail(position)], position)
        if not is_host(self._tokens.device):
            self.allocate()
        if self._has_tables:
            self._write(slot, thought)

    def _write(self, slot: int, thought: _Thought) -> None:
        close, width = thought.close, MAX_MARKER_TOKENS
        patterns: list[list[int]] = [[] for _ in range(_BEGINNINGS.stop)]
        patterns[: len(thought.starts)] = thought.starts
        patterns[_ENDS.start : _ENDS.start + len(thought.ends)] = thought.ends
        for size in range(1, len(close) + 1):
            patterns[_BEGINNINGS.start + size - 1] = close[:size]
        rows = [
            thought.until, thought.written, thought.tokens, len(close), thought.essential,
            *(token for each in patterns for token in (*[_ANY] * (width - len(each)), *each)),
            *(len(each) or _NEVER for each in patterns),
            *close, *[0] * (width - len(close)),
        ]  # fmt: skip
        state, pattern, length, close_row = upload(rows, self._tokens.device, torch.int64).split(
            [5, len(patterns) * width, len(patterns), width]
        )
        self._state[slot] = state
        self._patterns[slot] = pattern.view(len(patterns), width)
        self._lengths[slot] = length
        self._close[slot] = close_row

    def limit_any(self, slots: Sequence[int]) -> bool:
        """Whether any of the slots has a budget."""
        return bool(self._thoughts) and not self._thoughts.keys().isdisjoint(slots)

    def advance(self, rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes up each row's last token. Call it once for each new token, before the next one is chosen.

        Args:
            rows: int64 [rows], the slot of each row.
            positions: int64 [rows], the position of the token to choose: the number of tokens before it.

        Returns:
            The fields of `Endings`.
        """
        return (self._advance if self._has_tables else self._advance_on_host)(rows, positions)

    def _advance_on_host(
        self, rows: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        due, tokens = [False] * len(rows), [0] * len(rows)
        for row, (slot, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            if (thought := self._thoughts.get(slot)) is None:
                continue
            thought.take(self._tokens[slot, thought.tail(position)].tolist(), position)
            if position >= thought.until:
                due[row], tokens[row] = True, thought.close[thought.written]
        return torch.tensor(due), torch.tensor(tokens)

    def _advance(self, rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        until, written, tokens, close_len, essential = self._state[rows].unbind(1)
        places = positions[:, None] - self._counts.flip(0)
        last = self._tokens[rows[:, None], places.clamp_(min=0)]
        patterns = self._patterns[rows]
        found = ((patterns == last[:, None]) | (patterns == _ANY)).all(dim=-1)
        # Markers are new tokens only. The prompt may end like one.
        found &= self._lengths[rows] <= (positions - self._prompt_len[rows])[:, None]
        begun = (found[:, _BEGINNINGS] * self._counts).amax(dim=-1)
        idle = until == _NEVER
        ends = found[:, _ENDS].any(dim=-1) & ~idle & ~((positions > until) & (begun > 0))
        until = torch.where(idle & found[:, _STARTS].any(dim=-1), positions + tokens, until)
        ends |= (positions >= until) & (begun == close_len)
        ends |= (written >= essential) & (begun != written + 1)
        until = until.masked_fill(ends, _NEVER)
        due = positions >= until
        self._state[rows, :2] = torch.stack([until, begun * due], dim=1)
        index = begun.clamp(max=MAX_MARKER_TOKENS - 1)[:, None]
        return due, self._close[rows].gather(1, index)[:, 0]


def thinking_bytes(num_slots: int) -> int:
    """Returns the bytes of the tables of `num_slots` slots."""
    return 8 * (num_slots + 1) * (5 + _BEGINNINGS.stop * (MAX_MARKER_TOKENS + 1) + MAX_MARKER_TOKENS)
