"""One request's position in its grammar."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch

from protos.errors import Internal, InvalidArgument
from worker_svc.grammars.lowering.refusals import PARAM

if TYPE_CHECKING:
    import xgrammar

# CPU time that matching may take: a base plus an allowance per token. Matching an ambiguous grammar gets
# slower with every token, and it delays the whole batch.
_BUDGET_S: Final = 1.0
_BUDGET_PER_TOKEN_S: Final = 0.001
# Tokens in one jump. The rest of a longer chain follows the next sample.
MAX_JUMP: Final = 128
# If two of these may come next, there is a choice. They cover white space in JSON, strings and numbers; for
# anything else the mask decides.
_PROBES: Final = (" ", "\n", "a", "e", "1", "3")

OnOverBudget = Callable[[InvalidArgument], None]
"""Receives the refusal when matching a grammar has taken too long."""


class Matcher:
    """Decides which tokens may come next, given the tokens so far.

    An exception from xgrammar fails only this request. All of its CPU time counts against the request's
    budget. Every method that moves the matcher or asks for a mask raises `InvalidArgument` once the budget is
    exceeded and `Internal` if xgrammar fails.
    """

    def __init__(
        self, grammar: "xgrammar.CompiledGrammar", end_ids: Sequence[int], output: Sequence[int],
        on_over_budget: OnOverBudget = lambda _: None,
    ) -> None:  # fmt: skip
        """Starts after `output`, the tokens generated so far.

        Raises:
            InvalidArgument: the grammar does not allow `output`, or matching it takes too long.
            Internal: xgrammar failed.
        """
        import xgrammar

        # A reference: the compiler counts the grammar's bytes while any matcher holds it.
        self._grammar = grammar
        self._budget = _CpuBudget(on_over_budget)
        self._end_ids = tuple(end_ids)
        with self._budget:
            self._matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=list(end_ids))
            # Whether the sequence may end, and whether it has; asked once a token.
            self._completed = bool(self._matcher.is_completed())
        self._ended = False
        for index, token in enumerate(output):
            if not self.accept(token):
                raise InvalidArgument(
                    f"output token {index} (id {token}) is not allowed by the grammar of the request",
                    param=PARAM,
                )

    @property
    def ended(self) -> bool:
        """Whether an end token was accepted."""
        return self._ended

    def accept(self, token: int) -> bool:
        """Advances past a token.

        Returns False and stays where it is if the grammar does not allow the token.
        """
        with self._budget:
            accepted = bool(self._matcher.accept_token(token))
            if accepted:
                self._budget.num_tokens += 1
                self._completed = bool(self._matcher.is_completed())
                self._ended = token in self._end_ids
        return accepted

    def fill_mask(self, masks: torch.Tensor, row: int) -> None:
        """Writes one bit per allowed token into `masks[row]`, int32 [rows, ceil(vocab / 32)]."""
        with self._budget:
            self._matcher.fill_next_token_bitmask(masks, row)

    def jump(self, masks: torch.Tensor, row: int, room: int, min_tokens: int) -> tuple[int, ...]:
        """Accepts and returns the tokens that follow without a choice.

        At most `MAX_JUMP` tokens are accepted, or `min_tokens` if that is more.

        A chain that reaches the end is always taken: it saves every remaining step. Another chain is taken if
        it has at least `min_tokens`.

        Args:
            masks: masks as for `fill_mask`; `row` is overwritten.
            row: index into `masks`.
            room: largest number of tokens to accept.
            min_tokens: shortest chain to take; 0 takes only chains that reach the end.
        """
        chain: list[int] = []
        while len(chain) < min(room, max(min_tokens, MAX_JUMP)):
            completed = self._completed
            # An end is not forced yet, and a shorter chain is not wanted: the common case costs nothing.
            if not completed and not min_tokens:
                break
            with self._budget:
                # Where the sequence may end, the end is one choice, so one more character makes two.
                if self._allows_probes(1 if completed else 2):
                    break
                self._matcher.fill_next_token_bitmask(masks, row)
            words = _unsigned_words(masks, row)
            token = self._end_ids[0] if completed and self._only_end_allowed(words) else _only_token(words)
            if token is None or not self.accept(token):
                break
            chain.append(token)
            if self.ended:
                return tuple(chain)
        if min_tokens and len(chain) >= min_tokens:
            return tuple(chain)
        if chain:
            with self._budget:
                self._matcher.rollback(len(chain))
                self._budget.num_tokens -= len(chain)
                self._completed = bool(self._matcher.is_completed())
        return ()

    def _allows_probes(self, count: int) -> bool:
        """Whether at least `count` of the probe characters may come next. Cheaper than a mask.

        xgrammar's own search for forced text is no alternative: it builds the whole text on every call.
        """
        for char in _PROBES:
            if self._matcher.accept_string(char):
                self._matcher.rollback(1)
                count -= 1
                if not count:
                    return True
        return False

    def accept_forced_end(self, masks: torch.Tensor, row: int) -> int | None:
        """Accepts and returns an end token if only that is allowed, else `None`; overwrites `masks[row]`."""
        self.fill_mask(masks, row)
        end = self._end_ids[0]
        return end if self._only_end_allowed(_unsigned_words(masks, row)) and self.accept(end) else None

    def _only_end_allowed(self, words: npt.NDArray[np.uint32]) -> bool:
        """Whether a mask allows end tokens and nothing else."""
        if np.count_nonzero(words) > len(self._end_ids):
            return False
        nonzero = words[np.flatnonzero(words)]
        ends = sum(int(words[token >> 5]) >> (token & 31) & 1 for token in self._end_ids)
        return sum(int(word).bit_count() for word in nonzero) == ends > 0


class _CpuBudget:
    """Context for calls of xgrammar: adds up their CPU time, and converts exceptions to request errors."""

    def __init__(self, on_over_budget: OnOverBudget) -> None:
        self._on_over_budget = on_over_budget
        self._spent_s = 0.0
        self._started = 0.0
        self.num_tokens = 0
        """Accepted tokens, which extend the budget."""

    def __enter__(self) -> None:
        """Starts the clock."""
        self._started = time.thread_time()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Stops the clock.

        Raises:
            InvalidArgument: the total exceeds the budget.
            Internal: the call raised.
        """
        self._spent_s += time.thread_time() - self._started
        if isinstance(error, RuntimeError | MemoryError):
            raise Internal(f"matching the grammar failed: {error}", param=PARAM) from error
        if self._spent_s > _BUDGET_S + self.num_tokens * _BUDGET_PER_TOKEN_S:
            refusal = InvalidArgument(
                f"matching the grammar took {self._spent_s:.1f} s of CPU time for {self.num_tokens} tokens,"
                " which delays"
                " the whole batch; make it less ambiguous",
                param=PARAM,
            )
            self._on_over_budget(refusal)
            raise refusal


def _unsigned_words(masks: torch.Tensor, row: int) -> npt.NDArray[np.uint32]:
    """Returns a row of masks as unsigned words."""
    return masks[row].numpy().view(np.uint32)


def _only_token(words: npt.NDArray[np.uint32]) -> int | None:
    """Returns the only token that a mask allows; `None` if it allows several or none."""
    if np.count_nonzero(words) != 1:
        return None
    index = int(words.argmax())
    word = int(words[index])
    return None if word & (word - 1) else index * 32 + word.bit_length() - 1
