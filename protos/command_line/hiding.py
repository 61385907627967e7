"""Hides what may be secret in texts about a command line, which end up in logs."""

import re
from collections.abc import Iterable
from typing import Final

from protos.environment.table import HIDDEN

# Misspelled flags of secrets, such as --api-ky; not --max-tokens and --tokenizer.
_SECRET_FLAG: Final = re.compile(r"-(?:.*-)?(api|auth|key|secret|passw\w*|token)(-|$)")
_USER_OF_URL: Final = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def without_users(text: str) -> str:
    """Returns a text without the names and passwords in its URLs."""
    return _USER_OF_URL.sub(HIDDEN, text)


def without_secrets(arguments: Iterable[str]) -> str:
    """Returns arguments in one line, without the values of flags whose names sound like secrets."""
    shown, is_secret = [], False
    for argument in arguments:
        if argument.startswith("-"):
            flag, equals, _ = argument.partition("=")
            is_secret = bool(_SECRET_FLAG.match(flag.replace("_", "-")))
            shown.append(f"{flag}={HIDDEN}" if is_secret and equals else argument)
        else:
            shown.append(HIDDEN if is_secret else argument)
    return without_users(" ".join(shown))
