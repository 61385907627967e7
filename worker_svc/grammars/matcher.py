"""A request's position in its grammar."""

import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from protos.errors import Internal, InvalidArgument
from worker_svc.grammars.engines import PROBES, Grammar
from worker_svc.grammars.refusals import PARAM

# CPU time that matching may take: a base plus an allowance per token. Matching an ambiguous grammar gets
# slower with every token, and it delays the whole batch.
_BUDGET_S: Final = 1.0
_BUDGET_PER_TOKEN_S: Final = 0.001
# Tokens in one jump. The rest of a longer chain follows the next sample.
MAX_JUMP: Final = 128

OnOverBudget = Callable[[InvalidArgument], None]
"""Receives the refusal when matching a grammar has taken too long."""


class Matcher:
    """Decides which tokens may come next, given the tokens so far.

    An engine's exception fails only this request: every method raises `Internal` for one. All of its CPU
    time counts against the request's budget. Methods say where the caller measures that time, because a step
    measures the calls of all its rows at once; the others raise `InvalidArgument` once the budget is
    exceeded.
    """

    may_end: bool
    """Whether the sequence may end here and has not."""

    def __init__(
        self, grammar: Grammar, end_ids: Sequence[int], output: Sequence[int],
        on_over_budget: OnOverBudget = lambda _: None,
    ) -> None:  # fmt: skip
        """Starts after `output`, the tokens generated so far.

        Raises:
            InvalidArgument: the grammar does not allow `output`, or matching it takes too long.
            Internal: the engine failed.
        """
        # A reference: the compiler counts the grammar's bytes while any matcher holds it.
        self._grammar = grammar
        self._budget = _CpuBudget(on_over_budget)
        self._end_ids = tuple(end_ids)
        self._probes: tuple[int, ...] = tuple(range(len(PROBES)))
        with self._budget:
            self._position = grammar.start()
        self.may_end = self._position.may_end
        self._ended = False
        for index, token in enumerate(output):
            with self._budget:
                accepted = self.accept(token)
            if not accepted:
                raise InvalidArgument(
                    f"output token {index} (id {token}) is not allowed by the grammar of the request",
                    param=PARAM,
                )

    @property
    def ended(self) -> bool:
        """Whether an end token was accepted."""
        return self._ended

    def charge(self, seconds: float) -> None:
        """Counts CPU time measured by the caller against the budget."""
        self._budget.charge(seconds)

    def accept(self, token: int) -> bool:
        """Advances past a token; the caller measures the time.

        Returns False and stays where it is if the grammar does not allow the token, or it is negative: none.
        """
        if self._ended or token < 0:
            return False
        if token in self._end_ids:
            if not self.may_end:
                return False
            self._ended, self.may_end = True, False
        else:
            position = self._position
            try:
                if not position.accept(token):
                    return False
            except (RuntimeError, MemoryError) as error:
                raise _failure(error) from error
            self.may_end = position.may_end
        self._budget.num_tokens += 1
        return True

    def fill_mask(self, masks: torch.Tensor, row: int) -> None:
        """Writes a bit per allowed token into `masks[row]`, int32 [rows, ceil(vocab / 32)]."""
        with self._budget:
            self._position.fill_mask(masks, row)

    def has_choice(self) -> bool:
        """Whether several tokens may certainly come next; the caller measures the time.

        False means that only a mask can tell. The answer costs much less than a mask.
        """
        # Where the sequence may end, the end is one choice, so one more character makes two.
        missing = 1 if self.may_end else 2
        allowed: list[int] = []
        try:
            for probe in self._probes:
                if self._position.allows(probe):
                    allowed.append(probe)
                    if len(allowed) == missing:
                        # What was possible here is tried first at the next token.
                        if self._probes[:missing] != (*allowed,):
                            rest = [probe for probe in self._probes if probe not in allowed]
                            self._probes = (*allowed, *rest)
                        return True
        except (RuntimeError, MemoryError) as error:
            raise _failure(error) from error
        return False

    def take_chain(self, masks: torch.Tensor, row: int, room: int, min_tokens: int) -> tuple[int, ...]:
        """Accepts and returns the forced tokens, or stays and returns none.

        Takes a chain of at least `min_tokens`, or of two if it reaches the end of the sequence. A chain has
        at most `MAX_JUMP` tokens, or `min_tokens` if that is more.

        Args:
            masks: masks as for `fill_mask`; `row` is overwritten.
            row: index into `masks`.
            room: largest number of tokens to accept.
            min_tokens: shortest chain to take if it does not reach the end.
        """
        chain: list[int] = []
        with self._budget:
            while len(chain) < min(room, max(min_tokens, MAX_JUMP)) and not self._ended:
                token = self._forced_token(masks, row)
                if token is None or not self.accept(token):
                    break
                chain.append(token)
            if len(chain) >= (2 if self._ended else min_tokens):
                return tuple(chain)
            if chain:
                self._position.rollback(len(chain) - self._ended)
                self._budget.num_tokens -= len(chain)
                self.may_end, self._ended = self._position.may_end, False
        return ()

    def accept_forced_end(self, masks: torch.Tensor, row: int) -> int | None:
        """Accepts and returns an end token if only that is allowed, else `None`; overwrites `masks[row]`."""
        with self._budget:
            if self._ended:
                return None
            self._position.fill_mask(masks, row)
            end = self._end_ids[0]
            forced = self._only_end_allowed(_unsigned_words(masks, row)) and self.accept(end)
        return end if forced else None

    def _forced_token(self, masks: torch.Tensor, row: int) -> int | None:
        """Returns the token that must follow; `None` if there is a choice."""
        if self.has_choice():
            return None
        self._position.fill_mask(masks, row)
        words = _unsigned_words(masks, row)
        if self.may_end and self._only_end_allowed(words):
            return self._end_ids[0]
        return _only_token(words)

    def _only_end_allowed(self, words: npt.NDArray[np.uint32]) -> bool:
        """Whether a mask allows end tokens and nothing else."""
        if np.count_nonzero(words) > len(self._end_ids):
            return False
        nonzero = words[np.flatnonzero(words)]
        ends = sum(int(words[token >> 5]) >> (token & 31) & 1 for token in self._end_ids)
        return sum(int(word).bit_count() for word in nonzero) == ends > 0


class _CpuBudget:
    """Context for calls of an engine: adds up their CPU time, and converts exceptions to request errors."""

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
        spent_s = time.thread_time() - self._started
        if isinstance(error, RuntimeError | MemoryError):
            raise _failure(error) from error
        self.charge(spent_s)

    def charge(self, seconds: float) -> None:
        """Adds CPU time.

        Raises:
            InvalidArgument: the total exceeds the budget.
        """
        self._spent_s += seconds
        if self._spent_s > _BUDGET_S + self.num_tokens * _BUDGET_PER_TOKEN_S:
            refusal = InvalidArgument(
                f"matching the grammar took {self._spent_s:.1f} s of CPU time for {self.num_tokens} tokens,"
                " which delays"
                " the whole batch; make it less ambiguous",
                param=PARAM,
            )
            self._on_over_budget(refusal)
            raise refusal


def _failure(error: Exception) -> Internal:
    """Returns the error of a request whose matcher failed."""
    return Internal(f"matching the grammar failed: {error}", param=PARAM)


def _unsigned_words(masks: torch.Tensor, row: int) -> npt.NDArray[np.uint32]:
    """Returns a row of masks as unsigned words."""
    return masks[row].numpy().view(np.uint32)


def _only_token(words: npt.NDArray[np.uint32]) -> int | None:
    """Returns the only token allowed by a mask; `None` if it allows several or none."""
    if np.count_nonzero(words) != 1:
        return None
    index = int(words.argmax())
    word = int(words[index])
    return None if word & (word - 1) else index * 32 + word.bit_length() - 1
