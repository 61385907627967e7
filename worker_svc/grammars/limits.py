"""Limits of constraints, and errors for those that cannot be enforced."""

from typing import Any, Final, NoReturn

from protos.errors import InvalidArgument

MAX_NESTING: Final = 64
"""Levels of nesting in JSON, and of groups or parentheses in expressions and grammars."""
MAX_ALTERNATIVES: Final = 10_000
"""Alternatives in an expression or grammar, and texts in a choice."""
MAX_EXPANDED: Final = 100_000
"""Characters of an expression once its counted repetitions are written out."""
MAX_RULES: Final = 10_000
"""Rules of a grammar."""
MAX_TAGS: Final = 512
"""Parts of a structural tag."""
MAX_WHITESPACE: Final = 8
"""Consecutive white space characters allowed between the parts of JSON."""
PARAM: Final = "structured_output"
"""The request parameter named by every refusal."""


def refusal(message: str) -> InvalidArgument:
    """Returns an error naming the request parameter."""
    return InvalidArgument(message, param=PARAM)


def too_much(kind: str, most: str) -> str:
    """Returns the refusal of a constraint that takes more than `most` to compile."""
    return f"the {kind} cannot be compiled: it takes more than {most}; describe less of the output"


def memory_limit(num_bytes: int) -> str:
    """Returns words for a limit of memory, and of the stack, whose end looks the same."""
    return f"{num_bytes >> 20} MiB of memory, or nests too deep"


def refuse_schema(where: str, what: str) -> NoReturn:
    """Refuses a schema; `what` follows "the JSON schema at <where>"."""
    raise refusal(f"the JSON schema at {shown(where, quoted=False, width=80)} {what}")


def shown(value: Any, *, quoted: bool = True, width: int = 40) -> str:
    """Returns `value` as it appears in an error message, cut to `width` characters."""
    text = repr(value) if quoted else str(value)
    return text if len(text) <= width else f"{text[:width]}…"
