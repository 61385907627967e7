"""A compiled grammar, and a request's position in it."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from protos.errors import Internal, InvalidArgument
from worker_svc.grammars.limits import refusal

# If two of these characters may come next, there is a choice. They cover white space in JSON, strings and
# numbers.
_PROBES: Final = (b" ", b"\n", b"a", b"e", b"1", b"3")
# Limits of one mask's work, in llguidance's own units. A mask beyond them fails its request.
_LIMITS: Final = LLParserLimits(step_lexer_fuel=1_000_000, step_max_items=50_000)
# Estimate of a grammar's memory, which llguidance does not tell: a base, and an allowance for each byte of
# its source.
_BASE_BYTES: Final = 200_000
_BYTES_PER_BYTE: Final = 20
# CPU time that matching may take: a base plus an allowance per token. Matching an ambiguous grammar gets
# slower with every token, and it delays the whole batch.
_BUDGET_S: Final = 1.0
_BUDGET_PER_TOKEN_S: Final = 0.001
# Tokens in one jump. The rest of a longer chain follows the next sample.
MAX_JUMP: Final = 128

OnOverBudget = Callable[[InvalidArgument], None]
"""Receives the refusal when matching a grammar has taken too long."""


class Vocabulary:
    """A model's tokens as llguidance matches them: special tokens by their ids alone."""

    bos_token_id = None

    def __init__(self, folder: Path, size: int, end_ids: Sequence[int]) -> None:
        """Reads a `tokenizer.json`; ids beyond its own are never allowed."""
        try:
            read = LLTokenizer(str(folder / "tokenizer.json"))
        except ValueError as error:
            raise Internal(f"grammars cannot be compiled for this model: {error}") from error
        count = min(size, read.vocab_size)
        specials = {*filter(read.is_special_token, range(count)), *end_ids}
        self.eos_token_id = end_ids[0]
        self.special_token_ids = sorted(specials)
        self.tokens = [
            f"<{token}>".encode()
            if token in specials
            else read.decode_bytes([token])
            if token < count
            else b""
            for token in range(size)
        ]
        self._ids = {word: token for token, word in reversed(list(enumerate(self.tokens))) if word}
        self.tokenizer = LLTokenizer(TokenizerWrapper(self), eos_token=list(end_ids))
        """The same for llguidance."""
        self.probes = [self(probe) for probe in _PROBES]
        """Tokens to try where a choice is likely."""

    def __call__(self, text: bytes) -> list[int]:
        """Tokenizes a text of one token, or a text by its bytes."""
        if (found := self._ids.get(text)) is not None:
            return [found]
        return [self._ids[text[at : at + 1]] for at in range(len(text)) if text[at : at + 1] in self._ids]


class Grammar:
    """A compiled grammar. Its automata grow while requests use it, and all requests share them."""

    def __init__(self, text: str, vocabulary: Vocabulary) -> None:
        self._template = LLMatcher(
            vocabulary.tokenizer, LLMatcher.grammar_from_lark(text), log_level=0, limits=_LIMITS
        )
        if self._template.is_error():
            raise ValueError(self._template.get_error())
        self.probes = vocabulary.probes
        self.num_bytes = _BASE_BYTES + _BYTES_PER_BYTE * len(text)
        """Estimated memory in bytes."""

    def start(self) -> LLMatcher:
        """Returns the position before the first token."""
        return self._template.deep_copy()


class Matcher:
    """Decides which tokens may come next, given the tokens so far.

    A grammar beyond the engine's limits fails only its request: every method raises `InvalidArgument` for it.
    All of its CPU time counts against the request's budget. Methods say where the caller measures that time,
    because a step measures the calls of all its rows at once; the others raise `InvalidArgument` once the
    budget is exceeded.
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
        """
        # A reference: the compiler counts the grammar's bytes while any matcher holds it.
        self._grammar = grammar
        self._end_ids = tuple(end_ids)
        self._probes: Sequence[list[int]] = grammar.probes
        self._on_over_budget = on_over_budget
        self._spent_s = 0.0
        self._num_tokens = 0
        self._matcher = grammar.start()
        self.may_end = self._matcher.is_accepting()
        self._ended = False
        for index, token in enumerate(output):
            with self._timed():
                accepted = self.accept(token)
            if not accepted:
                raise refusal(
                    f"output token {index} (id {token}) is not allowed by the grammar of the request"
                )

    @property
    def ended(self) -> bool:
        """Whether an end token was accepted."""
        return self._ended

    def charge(self, seconds: float) -> None:
        """Counts CPU time measured by the caller; beyond the budget, the request is refused."""
        self._spent_s += seconds
        if self._spent_s > _BUDGET_S + self._num_tokens * _BUDGET_PER_TOKEN_S:
            error = refusal(
                f"matching the grammar took {self._spent_s:.1f} s of CPU time for {self._num_tokens} tokens,"
                " which delays the whole batch; make it less ambiguous"
            )
            self._on_over_budget(error)
            raise error

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
            if not self._matcher.try_consume_tokens([token]):
                self._check()
                return False
            self.may_end = self._matcher.is_accepting()
        self._num_tokens += 1
        return True

    def fill_mask(self, masks: torch.Tensor, row: int) -> None:
        """Writes a bit per allowed token into `masks[row]`, int32 [rows, ceil(vocab / 32)]."""
        with self._timed():
            self._words(masks, row)

    def has_choice(self) -> bool:
        """Whether several tokens may certainly come next; the caller measures the time.

        False means that only a mask can tell. The answer costs much less than a mask.
        """
        # Where the sequence may end, the end is one choice, so one more character makes two.
        missing = 1 if self.may_end else 2
        allowed: list[list[int]] = []
        for probe in self._probes:
            if self._matcher.validate_tokens(probe):
                allowed.append(probe)
                if len(allowed) == missing:
                    # What was possible here is tried first at the next token.
                    if self._probes[:missing] != allowed:
                        self._probes = [*allowed, *(each for each in self._probes if each not in allowed)]
                    return True
        self._check()
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
        with self._timed():
            while len(chain) < min(room, max(min_tokens, MAX_JUMP)) and not self._ended:
                token = self._forced_token(masks, row)
                if token is None or not self.accept(token):
                    break
                chain.append(token)
            if len(chain) >= (2 if self._ended else min_tokens):
                return tuple(chain)
            if chain:
                self._matcher.rollback(len(chain) - self._ended)
                self._check()
                self._num_tokens -= len(chain)
                self.may_end, self._ended = self._matcher.is_accepting(), False
        return ()

    def accept_forced_end(self, masks: torch.Tensor, row: int) -> int | None:
        """Accepts and returns an end token if only that is allowed, else `None`; overwrites `masks[row]`."""
        with self._timed():
            if self._ended or not self._only_end_allowed(self._words(masks, row)):
                return None
            return self._end_ids[0] if self.accept(self._end_ids[0]) else None

    def _forced_token(self, masks: torch.Tensor, row: int) -> int | None:
        """Returns the token that must follow; `None` if there is a choice."""
        if self.has_choice():
            return None
        words = self._words(masks, row)
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

    def _words(self, masks: torch.Tensor, row: int) -> npt.NDArray[np.uint32]:
        """Writes the mask and returns its words."""
        words = masks[row].numpy().view(np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()
        return words

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Charges the CPU time of the context."""
        started = time.thread_time()
        yield
        self.charge(time.thread_time() - started)

    def _check(self) -> None:
        if self._matcher.is_error():
            line = self._matcher.get_error().partition("\n")[0][:300]
            raise refusal(f"the grammar cannot be matched: {line}")


def _only_token(words: npt.NDArray[np.uint32]) -> int | None:
    if np.count_nonzero(words) != 1:
        return None
    index = int(words.argmax())
    word = int(words[index])
    return None if word & (word - 1) else index * 32 + word.bit_length() - 1
