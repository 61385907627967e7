"""The facts that the ranks of a replica compare when they join."""

from typing import Any

import pytest

from worker_svc.devices.cpu.device import CpuDevice
from worker_svc.execution.lockstep import rank_facts
from worker_svc.settings import Settings


def facts(dtype: str = "float32", **fields: Any) -> dict[str, str]:
    return rank_facts(Settings(model="m", **fields), CpuDevice(), dtype)


@pytest.mark.parametrize(
    ("other", "key"),
    [
        ({"enable_warm_up": False}, "--enable-warm-up"),
        ({"compile_strict": True}, "--compile-strict"),
        ({"optimization_level": 2}, "-O"),
        ({"dtype": "bfloat16"}, "dtype"),
    ],
)
def test_a_flag_that_ranks_must_share_is_a_fact(other: dict[str, Any], key: str) -> None:
    """No other fact changes with it."""
    usual, changed = facts(), facts(**other)
    assert {name for name in usual.keys() | changed.keys() if usual[name] != changed[name]} == {key}


def test_flags_of_one_rank_are_no_facts() -> None:
    """Ranks listen on ports of their own, and have different memory."""
    assert facts() == facts(port=1, kv_memory=2.0, cpu_threads=3, local_rank=1)


def test_versions_and_the_device_are_facts() -> None:
    """Kernels of another release, or of another device, compute slightly different logits."""
    assert {"device", "version of python", "version of torch"} <= facts().keys()
