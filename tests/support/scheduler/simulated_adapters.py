"""A worker's own store of LoRA adapters, whose sources stand for files and whose matrices are names."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from protos.errors import TriptychError
from scheduler_svc.adapters.registry import LoadedAdapter
from worker_svc.devices.lora_stack import LayerWeights
from worker_svc.lora.checkpoint import AdapterCheckpoint, LoraLimits
from worker_svc.lora.store import AdapterStore


class _Device:
    """Notes the weights in each slot."""

    def __init__(self) -> None:
        self.weights: dict[int, str] = {}

    def fit(self, checkpoint: AdapterCheckpoint) -> Mapping[str, LayerWeights]:
        return {checkpoint.digest: []}

    def place(self, slot: int, matrices: Mapping[str, LayerWeights]) -> None:
        (self.weights[slot],) = matrices

    def select(self, slots: torch.Tensor) -> torch.Tensor:
        return slots


class SimulatedAdapters(AdapterStore):
    """The store of a simulated device."""

    def __init__(
        self, max_loras: int, max_cpu_loras: int, sources: Mapping[str, str | TriptychError]
    ) -> None:
        """Starts empty. A source that is absent from `sources` is its own weights."""
        self._device = _Device()
        super().__init__(LoraLimits(max_loras, 16, max_cpu_loras), self._device)
        self._sources = sources

    @property
    def hosted(self) -> dict[int, str]:
        """The adapters on the host by id, with their weights."""
        return {one: adapter.digest for one, adapter in self._on_host.items()}

    def begin(self, load_id: int, needed: Collection[int]) -> list[int]:
        """Makes room for an adapter, as a worker does before it reads it; returns those that left."""
        displaced = self.displaced(needed)
        for each in displaced:
            self.unload(each)
        self.reserve(load_id)
        return displaced

    def end(self, load_id: int, source: str, displaced: Sequence[int]) -> LoadedAdapter:
        """Reads the adapter."""
        loaded = self.load(load_id, source, source)
        assert len(self._on_host) <= self.limits.max_cpu_loras
        return LoadedAdapter(loaded.rank, loaded.digest, displaced=tuple(displaced))

    def admit(self, row: int, adapter_id: int) -> str:
        """Places an adapter for a request, and returns its weights."""
        slot = self.place(adapter_id)
        self.use(row, adapter_id)
        return self._device.weights[slot]

    def _read(self, name: str, source: str, revision: str) -> tuple[AdapterCheckpoint, Any, str]:
        weights = self._sources.get(source, source)
        if isinstance(weights, TriptychError):
            raise weights
        checkpoint = AdapterCheckpoint(name, 8, {}, weights)
        return checkpoint, self._model.fit(checkpoint), revision
