"""The sampling parameters that requests have if they omit them: `--generation-config` and its overrides."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from protos.errors import ConfigurationRefused
from protos.limits import SAMPLING
from protos.logs import get_logger

_FILE: Final = "generation_config.json"
_NAMES: Final = {
    "temperature": "temperature",
    "max_new_tokens": "max_tokens",
    **{name: name for name, bounds in SAMPLING.items() if bounds.off},
}
"""The names of generation_config.json, and ours: length, temperature, and what can be switched off."""


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
        too_low = bounds.low is not None and (
            value < bounds.low or (bounds.above_low and value == bounds.low)
        )
        if too_low or (bounds.high is not None and value > bounds.high):
            raise ValueError(f"has {name} out of its bounds")


def default_sampling(
    model: Mapping[str, float], source: str, overrides: Mapping[str, Any]
) -> dict[str, float]:
    """Returns the sampling parameters of requests that omit them.

    Args:
        model: those of the model's own file.
        source: `--generation-config`.
        overrides: `--override-generation-config`.

    Raises:
        ConfigurationRefused: the folder has no generation_config.json.
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
