"""A fake of rebel-compiler, as strict about its interface as the vendor's packages need it.

It accepts the calls of torch-rbln 0.12.0 and of vllm-rbln 0.11.2 and 0.12.0, and refuses everything else.
Importing it declares the compiler's own attention operators. `STUB_RBLN_NPU` names the NPU; empty: there is
none. Other versions (`FAKE_REBEL_VERSION`) do not find one another's code.
"""

import os
from typing import Any

import torch

from rebel import eager
from rebel.device_info import get_npu_name
from worker_svc.devices.rbln import operators
from worker_svc.devices.rbln.operators import CUSTOM, SIGNATURES

__all__ = ("CompileContext", "get_npu_name", "storage_of")
__version__ = os.environ.get("FAKE_REBEL_VERSION", "0.12.0")

operators.register(CUSTOM, SIGNATURES[CUSTOM])
operators.register_samplers()
eager.forbid()


class CompileContext:
    """What graphs share whose caches lie in the runtime's memory."""

    def __init__(self, *, use_weight_sharing: bool = False, use_global_ctx: bool = False) -> None:
        """Takes the options of the vendor's context."""
        assert use_weight_sharing
        assert use_global_ctx
        self.memory: dict[int, torch.Tensor] = {}
        """The memory behind the storages that stay where they are."""
        self._names: set[str] = set()

    def mark_static_address(self, tensor: torch.Tensor, name: str) -> None:
        """Gives a tensor on the meta device memory, which holds NaN at first."""
        if not tensor.is_meta or tensor.storage_offset():
            raise RuntimeError(f"rebel: {name} must be a whole tensor on the meta device")
        if name in self._names:
            raise RuntimeError(f"rebel: two static tensors are called {name}")
        self._names.add(name)
        self.memory[storage_of(tensor)] = torch.full(tensor.shape, torch.nan, dtype=tensor.dtype)

    def resolve(self, value: Any) -> Any:
        """Returns the memory behind a marked tensor, and anything else unchanged."""
        if not isinstance(value, torch.Tensor) or not value.is_meta:
            return value
        if (memory := self.memory.get(storage_of(value))) is None:
            raise RuntimeError("rebel: an input on the meta device has no static address")
        return memory


def storage_of(tensor: torch.Tensor) -> int:
    """Identifies a storage that has no memory."""
    return int(tensor.untyped_storage()._cdata)
