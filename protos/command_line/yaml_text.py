"""Parses YAML, and says where it is wrong without repeating it: files of settings hold secrets."""

from typing import Any


def parse_yaml(content: bytes) -> Any:
    """Returns the value of a YAML document.

    Raises:
        ValueError: It is not YAML. The message is the place, or empty: `` at line 2, column 1``.
    """
    import yaml  # a service without such a file does without

    try:
        return yaml.load(content, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - a safe loader
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        mark = getattr(error, "problem_mark", None)
        raise ValueError(f" at line {mark.line + 1}, column {mark.column + 1}" if mark else "") from None
