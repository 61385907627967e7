"""A fake of torch_rbln: torch's device "rbln", in host memory.

It has the eager operators that a worker may call outside of graphs, and PyTorch refuses all others. The
device is a real one to PyTorch: its tensors are plain tensors, and no CPU kernel touches them by accident.
"""

import os
import sys
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
from torch import distributed
from torch.utils.backend_registration import rename_privateuse1_backend

from torch_rbln.build import library

__version__ = "0.12.0"


def _device_module() -> ModuleType:
    """Returns `torch.rbln`, with what PyTorch asks of a device's module."""
    module = ModuleType("torch.rbln")
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "is_initialized": True, "_is_in_bad_fork": False,
        "get_amp_supported_dtype": [], "_lazy_init": None, "manual_seed_all": None,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(module, name, lambda *_, answer=answer: answer)
    return module


def _collectives(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Returns backend "rbln-ccl", which takes what the vendor's plugin sets and runs in host memory."""
    for name in ("LOCAL_RANK", "WORLD_SIZE"):
        if name not in os.environ:
            raise RuntimeError(f"rbln-ccl: {name} is not set")
    return distributed.ProcessGroupGloo(store, rank, size, timeout)


distributed.Backend.register_backend("rbln-ccl", _collectives, devices=["cpu", "rbln"])
rename_privateuse1_backend("rbln")
torch.ops.load_library(library())  # type: ignore[no-untyped-call]
torch.ops.fake_rbln.register_hooks()
torch._register_device_module("rbln", _device_module())  # type: ignore[no-untyped-call]
sys.modules["torch.rbln"] = torch.rbln  # type: ignore[attr-defined]
