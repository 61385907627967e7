"""One request's place in its grammar."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch

from protos.errors import Internal, InvalidArgument
from worker_svc.grammars.lowering.limits import PARAM

if TYPE_CHECKING:
    import xgrammar

# CPU seconds that a grammar may cost in steps, beside so much a token: an ambiguous one costs more with every token, and everybody waits.
_BUDGET_S: Final = 1.0
_BUDGET_PER_TOKEN_S: Final = 0.001
# Forced tokens that are taken at a time; what is left of a chain comes with the next sample.
LONGEST_JUMP: Final = 128
# Of which two that may come next prove a choice: what may stand between the parts of JSON, in texts and in numbers. Where only others may,
# making the mask tells.
_PROBES: Final = (" ", "\n", "a", "e", "1", "3")

Costly = Callable[[InvalidArgument], None]
"""Told why when a grammar has cost more than others should wait for."""


class Matcher:
    """Which tokens may come next, given those that came.

    Whatever xgrammar raises is the request's own failure, and whatever it does counts towards the request's budget.

    Attributes:
        ended: whether an end token was taken.
    """

    def __init__(
        self, grammar: "xgrammar.CompiledGrammar", end_ids: Sequence[int], output: Sequence[int],
        costly: Costly = lambda _: None,
    ) -> None:  # fmt: skip
        """Takes up behind ``output``, what was generated so far.

        Raises:
            InvalidArgument: if the grammar does not allow it, or costs more than others should wait for.
            Internal: if the matcher fails.
        """
        import xgrammar

        # Its bytes are counted for as long as a matcher uses them.
        self._grammar = grammar
        self._budget = _Budget(costly)
        self._end_ids = tuple(end_ids)
        with self._budget:
            self._matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=list(end_ids))
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
        with self._budget:
            taken = bool(self._matcher.accept_token(token))
            self._budget.num_tokens += taken
        return taken

    def fill(self, masks: torch.Tensor, row: int) -> None:
        """Writes which tokens are allowed into a row of int32 [rows, ceil(vocab / 32)], a bit each.

        Raises:
            InvalidArgument: if the grammar costs more than others should wait for.
            Internal: if the matcher fails.
        """
        with self._budget:
            self._matcher.fill_next_token_bitmask(masks, row)

    def forced(self, masks: torch.Tensor, row: int, room: int, least: int) -> tuple[int, ...]:
        """Takes the tokens that follow without a choice, up to :data:`LONGEST_JUMP` (or ``least``), and returns them.

        A chain that leads to the end is always taken: nothing has to be computed for it. Others are if they are at least ``least`` long.

        Args:
            masks: scratch, as for :meth:`fill`.
            row: of ``masks``.
            room: tokens at most.
            least: 0 for none but the end.

        Raises:
            InvalidArgument: if the grammar costs more than others should wait for.
            Internal: if the matcher fails.
        """
        chain: list[int] = []
        while len(chain) < min(room, max(least, LONGEST_JUMP)):
            with self._budget:
                completed = bool(self._matcher.is_completed())
                # Where the end is one choice, any character is another.
                if (not completed and not least) or self._admits(1 if completed else 2):
                    break
                self._matcher.fill_next_token_bitmask(masks, row)
            words = _words(masks, row)
            token = self._end_ids[0] if completed and self._only_ends(words) else _single(words)
            if token is None or not self.take(token):
                break
            chain.append(token)
            if self.ended:
                return tuple(chain)
        if least and len(chain) >= least:
            return tuple(chain)
        if chain:
            with self._budget:
                self._matcher.rollback(len(chain))
                self._budget.num_tokens -= len(chain)
        return ()

    def _admits(self, count: int) -> bool:
        """Whether so many characters are seen to be possible next, so that there is a choice: a look that is cheaper than a mask.

        Asking xgrammar for the text that is forced would build all of it, each time, however long it is.
        """
        for char in _PROBES:
            if self._matcher.accept_string(char):
                self._matcher.rollback(1)
                count -= 1
                if not count:
                    return True
        return False

    def finish(self, masks: torch.Tensor, row: int) -> int | None:
        """Takes and returns an end token if nothing else is allowed; ``None`` if something is.

        Raises:
            InvalidArgument: if the grammar costs more than others should wait for.
            Internal: if the matcher fails.
        """
        self.fill(masks, row)
        return (
            self._end_ids[0] if self._only_ends(_words(masks, row)) and self.take(self._end_ids[0]) else None
        )

    def _only_ends(self, words: npt.NDArray[np.uint32]) -> bool:
        """Whether nothing but end tokens is allowed."""
        if np.count_nonzero(words) > len(self._end_ids):
            return False
        left = words[np.flatnonzero(words)]
        ends = sum(int(words[token >> 5]) >> (token & 31) & 1 for token in self._end_ids)
        return sum(int(word).bit_count() for word in left) == ends > 0


class _Budget:
    """Around calls of xgrammar: counts their CPU time, and makes what they raise a failure of this request."""

    def __init__(self, costly: Costly) -> None:
        """Nothing is spent."""
        self._costly = costly
        self._spent_s = 0.0
        self._started = 0.0
        self.num_tokens = 0

    def __enter__(self) -> None:
        """Calls begin."""
        self._started = time.thread_time()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """They ended.

        Raises:
            InvalidArgument: if all of them cost more than others should wait for.
            Internal: if one of them raised.
        """
        self._spent_s += time.thread_time() - self._started
        if isinstance(error, RuntimeError | MemoryError):
            raise Internal(f"matching the grammar failed: {error}", param=PARAM) from error
        if self._spent_s > _BUDGET_S + self.num_tokens * _BUDGET_PER_TOKEN_S:
            refusal = InvalidArgument(
                f"the grammar took {self._spent_s:.1f} s for {self.num_tokens} tokens, and everybody waits for it;"
                " make it less ambiguous",
                param=PARAM,
            )
            self._costly(refusal)
            raise refusal


def _words(masks: torch.Tensor, row: int) -> npt.NDArray[np.uint32]:
    """A row of masks as unsigned words."""
    return masks[row].numpy().view(np.uint32)


def _single(words: npt.NDArray[np.uint32]) -> int | None:
    """The one token that is allowed; ``None`` if there are others, or none."""
    if np.count_nonzero(words) != 1:
        return None
    index = int(words.argmax())
    word = int(words[index])
    return None if word & (word - 1) else index * 32 + word.bit_length() - 1
