"""The two grammar engines behind one interface: llguidance, and xgrammar for GBNF.

Positions raise `RuntimeError` or `MemoryError` if their engine fails.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from worker_svc.grammars.compile_client import GrammarVocabulary

if TYPE_CHECKING:
    import llguidance
    import xgrammar

# If two of these texts may come next, there is a choice. They cover white space in JSON, strings and numbers.
PROBES: Final = (" ", "\n", "a", "e", "1", "3")
# Limits of one mask's work, in llguidance's own units. A mask beyond them fails its request.
_STEP_LEXER_FUEL: Final = 1_000_000
_STEP_ITEMS: Final = 50_000
# Estimate of a grammar's memory, which llguidance does not tell: a base, and an allowance for each byte of
# its source.
_BASE_BYTES: Final = 200_000
_BYTES_PER_BYTE: Final = 20


class Position(Protocol):
    """A request's place in its grammar."""

    may_end: bool
    """Whether the text so far is complete."""

    def accept(self, token: int) -> bool:
        """Advances past a token, not an end token; stays and returns False if it is not allowed."""
        ...

    def allows(self, probe: int) -> bool:
        """Whether the probe with this index may come next."""
        ...

    def rollback(self, count: int) -> None:
        """Takes back the last tokens."""

    def fill_mask(self, masks: torch.Tensor, row: int) -> None:
        """Writes a bit per allowed token into a row, for the end tokens if the text may end."""


class Grammar(Protocol):
    """A compiled grammar."""

    num_bytes: int
    """Memory in bytes."""

    def start(self) -> Position:
        """Returns the position before the first token."""
        ...


class LarkGrammar:
    """A grammar of llguidance. Its automata grow while requests use it, and all requests share them."""

    def __init__(self, text: str, tokenizer: "llguidance.LLTokenizer") -> None:
        """Compiles a grammar.

        Raises:
            ValueError: it is malformed or too large.
        """
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(step_lexer_fuel=_STEP_LEXER_FUEL, step_max_items=_STEP_ITEMS)
        self._template = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(text), log_level=0, limits=limits)
        if self._template.is_error():
            raise ValueError(self._template.get_error())
        self._probes = [tokenizer.tokenize_str(probe)[:1] for probe in PROBES]
        self.num_bytes = _BASE_BYTES + _BYTES_PER_BYTE * len(text)

    def start(self) -> "LarkPosition":
        """Returns the position before the first token."""
        return LarkPosition(self._template.deep_copy(), self._probes)


class LarkPosition:
    """A position in a grammar of llguidance."""

    def __init__(self, matcher: "llguidance.LLMatcher", probes: Sequence[list[int]]) -> None:
        self._matcher = matcher
        self._probes = probes
        self.may_end = matcher.is_accepting()

    def accept(self, token: int) -> bool:
        """Advances past a token, not an end token; stays and returns False if it is not allowed."""
        matcher = self._matcher
        if not matcher.try_consume_tokens([token]):
            self._check()
            return False
        self.may_end = matcher.is_accepting()
        return True

    def allows(self, probe: int) -> bool:
        """Whether the probe with this index may come next."""
        return bool(self._matcher.validate_tokens(self._probes[probe]))

    def rollback(self, count: int) -> None:
        """Takes back the last tokens."""
        self._matcher.rollback(count)
        self._check()
        self.may_end = self._matcher.is_accepting()

    def fill_mask(self, masks: torch.Tensor, row: int) -> None:
        """Writes a bit per allowed token into a row, for the end tokens if the text may end."""
        words = masks[row]
        self._matcher.unsafe_compute_mask_ptr(words.data_ptr(), words.numel() * 4)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RuntimeError(self._matcher.get_error())


class XgrammarGrammar:
    """A grammar of xgrammar."""

    def __init__(self, grammar: "xgrammar.CompiledGrammar", vocabulary: GrammarVocabulary) -> None:
        from xgrammar import base

        self._grammar = grammar
        # The grammar refers to it.
        self._vocabulary = vocabulary
        self._end_ids = list(vocabulary.info.stop_token_ids)
        # xgrammar's compiled module: the classes around it add a fifth to each call.
        self._core: Any = base._core  # type: ignore[attr-defined]  # noqa: SLF001 - see above
        self.num_bytes = int(grammar.memory_size_bytes)

    def start(self) -> "XgrammarPosition":
        """Returns the position before the first token."""
        return XgrammarPosition(
            self._core.GrammarMatcher(self._grammar._handle, self._end_ids, False, -1, None)  # noqa: SLF001
        )


class XgrammarPosition:
    """A position in a grammar of xgrammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self.may_end = matcher.is_completed()

    def accept(self, token: int) -> bool:
        """Advances past a token, not an end token; stays and returns False if it is not allowed."""
        matcher = self._matcher
        if not matcher.accept_token(token, False):
            return False
        self.may_end = matcher.is_completed()
        return True

    def allows(self, probe: int) -> bool:
        """Whether the probe with this index may come next."""
        if not self._matcher.accept_string(PROBES[probe], False):
            return False
        self._matcher.rollback(1)
        return True

    def rollback(self, count: int) -> None:
        """Takes back the last tokens."""
        self._matcher.rollback(count)
        self.may_end = self._matcher.is_completed()

    def fill_mask(self, masks: torch.Tensor, row: int) -> None:
        """Writes a bit per allowed token into a row, for the end tokens if the text may end."""
        self._matcher.fill_next_token_bitmask(masks, row, False)
