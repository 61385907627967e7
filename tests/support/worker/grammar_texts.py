"""Which texts a constraint accepts, without a model: llguidance over single bytes."""

import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer
from tokenizers.models import BPE

from worker_svc.grammars.spec import Spec, lower
from worker_svc.grammars.tags import TokenNames

_BYTES = LLTokenizer("byte")


def lowered(spec: Spec) -> str:
    """Lowers a constraint for a model without special tokens."""
    return lower(spec, TokenNames(lambda: Tokenizer(BPE()), 257, [256]))


def accepts(spec: Spec) -> Callable[[str], bool]:
    """Returns a function that says whether a whole text is accepted."""
    text = lowered(spec)
    matcher = LLMatcher(_BYTES, LLMatcher.grammar_from_lark(text), log_level=0)
    assert not matcher.is_error(), matcher.get_error()

    def accepted(answer: str) -> bool:
        matcher.reset()
        data = list(answer.encode())
        taken = matcher.try_consume_tokens(data)
        assert not matcher.is_error(), matcher.get_error()
        return taken == len(data) and matcher.is_accepting()

    return accepted


def schema_spec(schema: Any) -> Spec:
    """Returns a JSON schema as a constraint; decimals are written as they are."""
    return Spec("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


def compact(value: Any) -> str:
    """Returns a value as compact JSON."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, default=_number)


def _number(value: Any) -> Any:
    assert isinstance(value, Decimal)
    return float(value)
