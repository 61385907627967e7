"""Bounds on a constraint, checked before an engine sees it."""

from typing import Final

MAX_NESTING: Final = 64
"""Levels of nesting in JSON, and of groups or parentheses in expressions and grammars."""
MAX_ALTERNATIVES: Final = 10_000
"""Alternatives in an expression or grammar, and texts in a choice."""
MAX_EXPANDED: Final = 100_000
"""Characters of an expression once its counted repetitions are written out."""
MAX_TAGS: Final = 512
"""Parts of a structural tag."""
MAX_WHITESPACE: Final = 8
"""Consecutive white space characters allowed between the parts of JSON."""
