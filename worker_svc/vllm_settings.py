"""Settings of the worker with vLLM's forms.

`--compilation-config`, the variable VLLM_CPU_KVCACHE_SPACE, and `--generation-config` with its overrides. The
worker's settings and rooms above them import this module, which imports `protos` alone.
"""

import ast
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

from protos.errors import ConfigurationRefused
from protos.limits import SAMPLING
from protos.service.logs import get_logger

MAX_GIB: Final = 1 << 20
"""The most KV memory of a setting."""
_KV_SPACE: Final = "VLLM_CPU_KVCACHE_SPACE"
_FILE: Final = "generation_config.json"
_NAMES: Final = {
    "temperature": "temperature",
    "max_new_tokens": "max_tokens",
    **{name: name for name, bounds in SAMPLING.items() if bounds.off},
}
"""The names of generation_config.json, and ours: length, temperature, and parameters with an off value."""


def literal(text: str) -> Any:
    """Returns the value of JSON or of a Python literal.

    Raises:
        ValueError: The text is neither.
    """
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError('should be a level or JSON, for example {"level": 3}') from error


class CompilationConfig(BaseModel):
    """The supported fields of vLLM's `--compilation-config`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    level: int | None = Field(None, ge=0, le=3)
    """The same as `-O`."""
    candidate_compile_sizes: tuple[Annotated[int, Field(ge=1, le=4096)], ...] | None = None
    """Decode buckets to generate kernels for. Default: all."""


def vllm_kv_space() -> float | None:
    """Returns the GiB of VLLM_CPU_KVCACHE_SPACE; `None` if unset or 0.

    Raises:
        ValueError: The value is not a number of GiB.
    """
    text = os.environ.get(_KV_SPACE, "").strip()
    try:
        value = float(text or 0)
    except ValueError:
        value = math.nan
    if not 0 <= value <= MAX_GIB:
        raise ValueError(f"{_KV_SPACE} should be a number of GiB from 0 to {MAX_GIB}, got {text!r}")
    return value or None


def warn_of_kv_space(device: str) -> None:
    """Logs that VLLM_CPU_KVCACHE_SPACE, if set, is not for this device."""
    if os.environ.get(_KV_SPACE, "").strip() not in {"", "0"}:
        get_logger().warning(
            "variable_ignored",
            variable=_KV_SPACE,
            reason=f"it is for CPUs, not for {device}; set --kv-memory",
        )


def recommended(config: Mapping[str, Any]) -> dict[str, float]:
    """Returns the sampling parameters of a generation_config.json under our names."""
    return {ours: config[name] for name, ours in _NAMES.items() if config.get(name) is not None}


def check_overrides(config: Mapping[str, Any]) -> None:
    """Checks the sampling parameters of `--override-generation-config`; other keys have no effect.

    Raises:
        ValueError: a value is not a number, or out of bounds.
    """
    for name in _NAMES.keys() & config.keys():
        value, bounds = config[name], SAMPLING.get(_NAMES[name])
        if value is None or (name == "top_k" and value == -1):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"should have a number for {name}")  # noqa: TRY004 - pydantic reports ValueErrors
        if bounds is None:
            continue
        too_low = bounds.HasField("min") and (
            value < bounds.min or (bounds.above_min and value == bounds.min)
        )
        if too_low or (bounds.HasField("max") and value > bounds.max):
            raise ValueError(f"has {name} out of its bounds")


def default_sampling(
    model: Mapping[str, float], source: str, overrides: Mapping[str, Any]
) -> dict[str, float]:
    """Returns the defaults of requests: the model's or `--generation-config`'s, then the overrides.

    Raises:
        ConfigurationRefused: The folder lacks a readable generation_config.json.
    """
    chosen = dict(model)
    if source == "vllm":
        chosen = {}
    elif source != "auto":
        chosen = recommended(_read(Path(source) / _FILE))
    if ignored := sorted(overrides.keys() - _NAMES.keys()):
        get_logger().warning("generation_override_ignored", keys=ignored)
    return chosen | recommended(overrides)


def _read(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text())
    except OSError as error:
        raise ConfigurationRefused(
            f"--generation-config: {path} cannot be read ({error.strerror}); use auto, vllm or another folder"
        ) from error
    except ValueError as error:
        raise ConfigurationRefused(f"--generation-config: {path} is not JSON: {error}") from error
    if not isinstance(read, dict):
        raise ConfigurationRefused(f"--generation-config: {path} is not a JSON object")
    return read
