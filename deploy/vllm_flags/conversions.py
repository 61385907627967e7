"""How values of vLLM's flags become values of ours."""

import re
from collections.abc import Mapping

from deploy.vllm_flags.flag import Convert

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)")
_PLACES = "kmgt"


def count(flag: str) -> Convert:
    """Converts a number as people write it: 8k is 8000, 8K is 8192."""
    return lambda text: [f"{flag}={number(text)}"]


def number(text: str) -> int:
    """Returns the number that vLLM reads: lower-case suffixes are powers of 1000, upper-case ones of 1024.

    Raises:
        ValueError: The text is not such a number.
    """
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        raise ValueError("should be a number, for example 8192, 8k (8000) or 8K (8192)")
    digits, suffix = match.groups()
    if suffix.islower():
        return int(float(digits) * 1000 ** (_PLACES.index(suffix) + 1))
    if not digits.isdecimal():
        raise ValueError("should be a whole number")
    return int(digits) * (1024 ** (_PLACES.index(suffix.lower()) + 1) if suffix else 1)


def gib(flag: str) -> Convert:
    """Converts bytes to GiB."""
    return lambda text: [f"{flag}={number(text) / 2**30:.6g}"]


def choice(flag: str, names: Mapping[str, str]) -> Convert:
    """Converts one word to another; a word that is not listed stays."""
    return lambda text: [f"{flag}={names.get(text, text)}"]


def switch(flag: str) -> Convert:
    """Converts a switch to a flag with a value of its own; without the switch nothing changes."""
    return lambda text: [flag] if text else []


def runner(text: str) -> list[str]:
    """Converts the runner: the model decides what it is."""
    if text not in {"auto", "generate", "pooling"}:
        raise ValueError("should be auto, generate or pooling")
    return []


_TASKS = {"embedding": "embed", "score": "classify"}


def task(text: str) -> list[str]:
    """Converts the task of earlier releases, which is what the model is converted to today."""
    if text in {"generate", "reward"}:
        return []
    if text not in {"auto", "embed", "classify", *_TASKS}:
        raise ValueError("should be auto, generate, embed, classify, score or reward")
    return convert(_TASKS.get(text, text))


def context_length(text: str) -> list[str]:
    """Converts the longest sequence; vLLM's words for what fits are the model's context here."""
    return [] if text.strip().lower() in {"auto", "-1"} else count("--max-model-len")(text)


def convert(text: str) -> list[str]:
    """Converts what a model is converted to."""
    if text not in {"auto", "none", "embed", "classify"}:
        raise ValueError("should be auto, none, embed or classify")
    return [] if text in {"auto", "none"} else [f"--pooling-task={text}"]
