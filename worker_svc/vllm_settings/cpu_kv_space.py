"""VLLM_CPU_KVCACHE_SPACE, which sizes the KV cache on a CPU and has no effect on other devices."""

import math
import os
from typing import Final

from protos.logs import get_logger

MAX_GIB: Final = 1 << 20
"""Most KV memory that a setting may ask for."""
_VARIABLE: Final = "VLLM_CPU_KVCACHE_SPACE"


def vllm_kv_space(device: str) -> float | None:
    """Returns the GiB that the variable gives a device; `None` if it is unset, 0 or not for this device.

    Raises:
        ValueError: The device is a CPU, and the value is no such number.
    """
    text = os.environ.get(_VARIABLE, "").strip()
    try:
        value = float(text or 0)
    except ValueError:
        value = math.nan
    if device != "cpu":
        if value:
            get_logger().warning(
                "variable_ignored",
                variable=_VARIABLE,
                reason=f"it is for CPUs, not for {device}; set --kv-memory",
            )
        return None
    if not 0 <= value <= MAX_GIB:
        raise ValueError(f"{_VARIABLE} should be a number of GiB from 0 to {MAX_GIB}, got {text!r}")
    return value or None
