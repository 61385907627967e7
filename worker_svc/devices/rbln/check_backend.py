"""Backend `rbln-check`: a CPU in place of an NPU, which holds graphs to the rules of its compiler.

Like the NPU's runtime, it owns the KV cache; the host gets handles on the meta device.
"""

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from protos.errors import ConfigurationRefused
from worker_svc.devices.rbln.graph_rules import NotLowered, trace


class MetaMemory:
    """The device's memory. The host refers to it by tensors on the meta device."""

    def __init__(self) -> None:
        """Starts empty."""
        self._real: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._real)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocates zeroed memory that lives as long as the returned tensor on the meta device."""
        handle = torch.empty(shape, dtype=dtype, device="meta")
        key = _storage(handle)
        self._real[key] = torch.zeros(shape, dtype=dtype)
        weakref.finalize(handle, self._real.pop, key, None)
        return handle

    def resolve(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the memory of a tensor of `allocate` or of a view of it; other tensors unchanged.

        Raises:
            KeyError: for a meta tensor without memory.
        """
        if not tensor.is_meta:
            return tensor
        real = self._real[_storage(tensor)]
        return real.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - identifies a storage that has no memory


class CheckBackend:
    """The backend that `torch.compile` calls."""

    graphs: list[fx.GraphModule]
    """The accepted graphs, in order."""
    folder: Path | None
    """Where to store graphs as text; `None` to store none."""

    def __init__(self, memory: MetaMemory) -> None:
        """Uses the given memory of the device."""
        self._memory = memory
        self.graphs = []
        self.folder = None

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Checks a graph and returns a function that runs it.

        Raises:
            ConfigurationRefused: names the dynamic or unlowered part.
        """
        try:
            graph = trace(module, inputs)
        except NotLowered as error:
            raise ConfigurationRefused(f"rbln-check: {error}") from error
        self.graphs.append(graph)
        if self.folder is not None:
            path = self.folder / f"graph-{len(self.graphs)}.txt"
            if not path.exists():  # complete cache entries are read-only
                path.write_text(graph.code, encoding="utf-8")
        resolve = self._memory.resolve

        def run(*arguments: Any) -> Any:
            return graph(*map(resolve, arguments))

        return run
