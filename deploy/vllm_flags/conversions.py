"""How values of vLLM's flags become values of ours."""

import ast
import contextlib
import json
import re
from collections.abc import Mapping

from deploy.vllm_flags.flag import Convert
from gateway.format_names import REASONING_FORMATS, TOOL_FORMATS, VLLM_PREFIX

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)")
_PLACES = "kmgt"
# vLLM's modes of compilation, whose numbers are levels.
_MODES = ("NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE")
_COMPILATION_KEYS = {
    "level": "level",
    "mode": "level",
    "compile_sizes": "candidate_compile_sizes",
    "candidate_compile_sizes": "candidate_compile_sizes",
}


def count(flag: str) -> Convert:
    """Converts a number as people write it: 8k is 8000, 8K is 8192."""
    return lambda text: [f"{flag}={number(text)}"]


def number(text: str) -> int:
    """Returns the number that vLLM reads: lower-case suffixes are powers of 1000, upper-case ones of 1024.

    Raises:
        ValueError: The text is no such number.
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


def tool_parser(text: str) -> list[str]:
    """Converts the name of a tool parser; a name that is only vLLM's stays vLLM's parser."""
    return [f"--tool-call-parser={_own_or_vllm(text, TOOL_FORMATS)}"]


def reasoning_parser(text: str) -> list[str]:
    """Converts the name of a reasoning parser."""
    return [f"--reasoning-parser={_own_or_vllm(text, REASONING_FORMATS)}"] if text else []


def _own_or_vllm(name: str, own: tuple[str, ...]) -> str:
    if name in ("auto", "none", *own) or name.startswith(VLLM_PREFIX):
        return name
    return f"{VLLM_PREFIX}{name}"


def runner(text: str) -> list[str]:
    """Converts the runner: the model decides what it is."""
    if text not in {"auto", "generate", "pooling"}:
        raise ValueError("should be auto, generate or pooling")
    return []


def convert(text: str) -> list[str]:
    """Converts what a model is converted to."""
    if text not in {"auto", "none", "embed", "classify"}:
        raise ValueError("should be auto, none, embed or classify")
    return [] if text in {"auto", "none"} else [f"--pooling-task={text}"]


def optimization_level(text: str) -> list[str]:
    """Converts `-O`, which once took the whole compilation configuration."""
    return compilation_config(text) if text.lstrip().startswith("{") else [f"--optimization-level={text}"]


def compilation_config(text: str) -> list[str]:
    """Converts the compilation configuration; keys about vLLM's own compiler have no effect."""
    read = _literal(text)
    if not isinstance(read, dict):
        return [f"--compilation-config={text}"]
    kept = {ours: read[name] for name, ours in _COMPILATION_KEYS.items() if name in read}
    if isinstance(level := kept.get("level"), str):
        if level.upper() not in _MODES:
            raise ValueError(f"should have a mode of {', '.join(_MODES)}")
        kept["level"] = _MODES.index(level.upper())
    kept = {name: value for name, value in kept.items() if value is not None}
    return [f"--compilation-config={json.dumps(kept)}"] if kept else []


def _literal(text: str) -> object:
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError):
            return read(text)
    return None
