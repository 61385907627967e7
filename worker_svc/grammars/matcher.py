"""One request's place in its grammar."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch

from protos.errors import Internal, InvalidArgument
from worker_svc.grammars.spec import PARAM

if TYPE_CHECKING:
    import xgrammar

# CPU seconds that a grammar may cost in steps, beside so much a token: an ambiguous one costs more with every token, and everybody waits.
_BUDGET_S: Final = 1.0
_BUDGET_PER_TOKEN_S: Final = 0.001


class Matcher:
    """Which tokens may come next, given those that came.

    Attributes:
        ended: whether an end token was taken.
    """

    def __init__(
        self, grammar: "xgrammar.CompiledGrammar", end_ids: Sequence[int], output: Sequence[int]
    ) -> None:
        """Takes up behind ``output``, what was generated so far.

        Raises:
            InvalidArgument: if the grammar does not allow it.
            Internal: if the matcher fails.
        """
        import xgrammar

        try:
            self._matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=list(end_ids))
        except RuntimeError as error:
            raise Internal(f"matching the grammar failed: {error}") from error
        self._end_ids = tuple(end_ids)
        self._num_tokens = 0
        self._spent_s = 0.0
        for index, token in enumerate(output):
            if not self.take(token):
                raise InvalidArgument(
                    f"output token {index} (id {token}) is not allowed by the grammar of the request",
                    param=PARAM,
                )

    @property
    def ended(self) -> bool:
        """Whether the grammar is through and an end token was taken."""
        return bool(self._matcher.is_terminated())

    def take(self, token: int) -> bool:
        """Goes on behind a token; False, and nothing has changed, if the grammar does not allow it.

        Raises:
            InvalidArgument: if the grammar costs more than others should wait for.
            Internal: if the matcher fails.
        """
        started = time.thread_time()
        try:
            taken = bool(self._matcher.accept_token(token))
        except RuntimeError as error:
            raise Internal(f"matching the grammar failed: {error}") from error
        self._num_tokens += taken
        self._spend(started)
        return taken

    def fill(self, masks: torch.Tensor, row: int) -> None:
        """Writes which tokens are allowed into a row of int32 [rows, ceil(vocab / 32)], a bit each.

        Raises:
            InvalidArgument: if the grammar costs more than others should wait for.
        """
        started = time.thread_time()
        try:
            self._matcher.fill_next_token_bitmask(masks, row)
        except RuntimeError as error:
            raise Internal(f"matching the grammar failed: {error}") from error
        self._spend(started)

    def forced(self, masks: torch.Tensor, row: int, room: int, least: int) -> tuple[int, ...]:
        """Takes the tokens that follow without a choice, and returns them.

        A chain that leads to the end is always taken: nothing has to be computed for it. Others are if they are at least ``least`` long.

        Args:
            masks: scratch, as for :meth:`fill`.
            row: of ``masks``.
            room: tokens at most.
            least: 0 for none but the end.
        """
        words = masks[row].numpy().view(np.uint32)
        chain: list[int] = []
        while len(chain) < room:
            completed = self._matcher.is_completed()
            if not completed and not (least and self._has_forced_text()):
                break  # there is a choice of characters, so there is one of tokens
            self.fill(masks, row)
            token = self._end_ids[0] if completed and self._only_ends(words) else _single(words)
            if token is None or not self.take(token):
                break
            chain.append(token)
            if self.ended:
                return tuple(chain)
        if least and len(chain) >= least:
            return tuple(chain)
        if chain:
            self._matcher.rollback(len(chain))
            self._num_tokens -= len(chain)
        return ()

    def _has_forced_text(self) -> bool:
        """Whether the next byte is certain: a cheap look before a mask is made."""
        try:
            return bool(self._matcher.find_jump_forward_string())
        except UnicodeDecodeError:
            return True  # it begins within a character

    def finish(self, masks: torch.Tensor, row: int) -> int | None:
        """Takes and returns an end token if nothing else is allowed; ``None`` if something is."""
        self.fill(masks, row)
        words = masks[row].numpy().view(np.uint32)
        return self._end_ids[0] if self._only_ends(words) and self.take(self._end_ids[0]) else None

    def _only_ends(self, words: npt.NDArray[np.uint32]) -> bool:
        """Whether nothing but end tokens is allowed."""
        left = words[np.flatnonzero(words)]
        ends = sum(int(words[token >> 5]) >> (token & 31) & 1 for token in self._end_ids)
        return len(left) <= len(self._end_ids) and sum(int(word).bit_count() for word in left) == ends > 0

    def _spend(self, started: float) -> None:
        self._spent_s += time.thread_time() - started
        if self._spent_s > _BUDGET_S + self._num_tokens * _BUDGET_PER_TOKEN_S:
            raise InvalidArgument(
                f"the grammar took {self._spent_s:.1f} s for {self._num_tokens} tokens, and everybody waits for it;"
                " make it less ambiguous",
                param=PARAM,
            )


def _single(words: npt.NDArray[np.uint32]) -> int | None:
    """The one token that is allowed; ``None`` if there are others, or none."""
    (where,) = np.nonzero(words)
    if len(where) != 1:
        return None
    index = int(where[0])
    word = int(words[index])
    return None if word & (word - 1) else index * 32 + word.bit_length() - 1
