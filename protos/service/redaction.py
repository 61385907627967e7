"""Hides possible secrets in texts about a command line, which end up in logs."""

import re
from collections.abc import Iterable, Sequence
from typing import Final

HIDDEN: Final = "********"
"""Stands for a secret value."""

# Also misspelled flags, such as --apiky. That this takes --tokenizer for a secret does no harm.
_SECRET_FLAG: Final = re.compile(
    r"-.*(api|auth|bearer|credential|header|key|passw|secret|token)", re.IGNORECASE
)
_SECRET_VARIABLE: Final = re.compile(r"(API|ACCESS|PRIVATE)_KEY|SECRET|PASSWORD|CREDENTIAL|TOKEN$")
_USER_OF_URL: Final = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def shown(name: str, value: str) -> str:
    """Returns a variable's value for people: a secret is hidden."""
    return HIDDEN if _SECRET_VARIABLE.search(name) else value


def without_users(text: str) -> str:
    """Returns a text without the names and passwords in its URLs."""
    return _USER_OF_URL.sub(HIDDEN, text)


def words_shown(words: Iterable[str], given: Sequence[str]) -> str:
    """Returns words of a command line as text, without possible values of a secret.

    These are all words of the line `given` between a flag whose name sounds like a secret and the next flag.
    """
    secrets, is_secret = set(), False
    for argument in given:
        if argument.startswith("-"):
            is_secret = bool(_SECRET_FLAG.match(argument.partition("=")[0]))
        elif is_secret:
            secrets.add(argument)
    return without_users(" ".join(HIDDEN if word in secrets else word for word in words))
