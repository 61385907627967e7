"""How values of vLLM's flags become arguments of ours."""

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from deploy.vllm_flags.table import Flag, names
from gateway.format_names import REASONING_FORMATS, TOOL_FORMATS, VLLM_PREFIX
from worker_svc.vllm_settings import literal

_COUNT: Final = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)")
_PLACES: Final = "kmgt"
_COMPILATION_KEYS: Final = {
    "level": "level",
    "mode": "level",
    "compile_sizes": "candidate_compile_sizes",
    "candidate_compile_sizes": "candidate_compile_sizes",
}
# vLLM's modes of compilation, whose numbers are levels.
_MODES: Final = ("NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE")


def convert(flag: Flag, text: str) -> list[str]:
    """Returns our arguments for a value of a mapped flag.

    Raises:
        ValueError: The value cannot be used. The message completes "--flag …".
    """
    word = flag.values.get(text.strip().lower())
    if word is not None:
        return [f"{flag.ours}={word}"] if word else []
    if flag.read == "words":
        *first, last = flag.values
        raise ValueError(f"should be {', '.join(first)} or {last}")
    return _READ[flag.read](flag.ours, text) if flag.read else [f"{flag.ours}={text}"]


def number(text: str) -> int:
    """Returns a number as vLLM reads it: lower-case suffixes are powers of 1000, upper-case of 1024.

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


def _optimization_level(ours: str, text: str) -> list[str]:
    """Converts `-O`, which once took the whole compilation configuration."""
    if not text.lstrip().startswith("{") or _is_ours(_literal(text)):
        return [f"{ours}={text}"]
    return _compilation_config("--compilation-config", text)


def _compilation_config(ours: str, text: str) -> list[str]:
    """Converts the compilation configuration; keys about vLLM's own compiler have no effect."""
    read: Any = _literal(text)
    if not isinstance(read, dict) or _is_ours(read):
        return [f"{ours}={text}"]
    if unknown := [name for name in read if name not in {*_COMPILATION_KEYS, *names("compilation-keys")}]:
        raise ValueError(f"has no key {unknown[0]!r}; level and candidate_compile_sizes have an effect here")
    kept = {key: read[name] for name, key in _COMPILATION_KEYS.items() if read.get(name) is not None}
    if isinstance(level := kept.get("level"), str):
        if level.upper() not in _MODES:
            raise ValueError(f"should have a mode of {', '.join(_MODES)}")
        kept["level"] = _MODES.index(level.upper())
    return [f"{ours}={json.dumps(kept)}"] if kept else []


def _is_ours(read: object) -> bool:
    """Returns whether all keys of a compilation configuration are ours."""
    return isinstance(read, dict) and read.keys() <= {"level", "candidate_compile_sizes"}


def _literal(text: str) -> object:
    with contextlib.suppress(ValueError):
        return literal(text)
    return None


def _parser(peer: str, own: Mapping[str, Any] | tuple[str, ...]) -> Callable[[str, str], list[str]]:
    """Returns the conversion of a parser's name, which is vLLM's if only vLLM knows it."""

    def read(ours: str, text: str) -> list[str]:
        foreign = text in names(peer) and text not in own
        return [f"{ours}={VLLM_PREFIX if foreign else ''}{text}"] if text else []

    return read


_READ: Final[Mapping[str, Callable[[str, str], list[str]]]] = {
    "count": lambda ours, text: [f"{ours}={number(text)}"],
    "GiB": lambda ours, text: [f"{ours}={number(text) / 2**30:.6g}"],
    "lower": lambda ours, text: [f"{ours}={text.lower()}"],
    "tool_parser": _parser("tool-parsers", TOOL_FORMATS),
    "reasoning_parser": _parser("reasoning-parsers", REASONING_FORMATS),
    "optimization_level": _optimization_level,
    "compilation_config": _compilation_config,
}
