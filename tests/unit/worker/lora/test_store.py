"""The store keeps adapters by id, within its limits, and knows what lies in the device's slots."""

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from protos.errors import Internal, InvalidArgument, NotFound, Overloaded, Unavailable
from tests.unit.worker.lora.test_checkpoint import PATH, _tensors, _write
from worker_svc.devices.lora_stack import LayerWeights
from worker_svc.lora.checkpoint import AdapterCheckpoint, LoraLimits
from worker_svc.lora.store import AdapterStore


class RecordingModel:
    """Fits every adapter, and notes what is placed."""

    def __init__(self) -> None:
        self.placed: dict[int, Any] = {}

    def fit(self, checkpoint: AdapterCheckpoint) -> Mapping[str, LayerWeights]:
        return {path: [pair] for path, pair in checkpoint.matrices.items()}

    def place(self, slot: int, matrices: Mapping[str, LayerWeights]) -> None:
        self.placed[slot] = matrices

    def select(self, slots: torch.Tensor) -> torch.Tensor:
        return slots


@pytest.fixture
def store() -> AdapterStore:
    return AdapterStore(LoraLimits(max_loras=2, max_rank=8, max_cpu_loras=2), RecordingModel())


def test_an_adapter_is_read_once(store: AdapterStore, tmp_path: Path) -> None:
    """The same id, name and source is the same adapter; another source is read."""
    first = store.load(1, "a", str(_write(tmp_path)))
    assert first.rank == 4
    assert first.num_bytes == 4 * (4 * 6 + 10 * 4)
    assert store.load(1, "a", str(tmp_path)) is first
    (tmp_path / "other").mkdir()
    other = _write(tmp_path / "other", _tensors(rank=4), lora_alpha=1)
    assert store.load(1, "a", str(other)).digest != first.digest


def test_the_host_holds_so_many(store: AdapterStore, tmp_path: Path) -> None:
    """Above --max-cpu-loras, nothing is loaded until something is unloaded."""
    source = str(_write(tmp_path))
    store.load(1, "a", source)
    store.load(2, "b", source)
    with pytest.raises(Overloaded, match="holds 2 adapters, as many as --max-cpu-loras allows"):
        store.load(3, "c", source)
    store.unload(1)
    store.unload(1)
    store.load(3, "c", source)
    store.forget()
    store.load(4, "d", source)


@pytest.mark.parametrize("how", ["unload", "forget"])
def test_an_adapter_that_is_unloaded_while_it_is_read(tmp_path: Path, how: str) -> None:
    """It takes no place on the host, whenever its reading ends."""

    class Interrupted(RecordingModel):
        def fit(self, checkpoint: AdapterCheckpoint) -> Mapping[str, LayerWeights]:
            if how == "unload":
                kept.unload(1)
            else:
                kept.forget()
            return super().fit(checkpoint)

    kept: AdapterStore = AdapterStore(LoraLimits(max_loras=1, max_rank=8, max_cpu_loras=1), Interrupted())
    source = str(_write(tmp_path))
    with pytest.raises(Unavailable, match="adapter a was unloaded while it was read"):
        kept.load(1, "a", source)
    kept._model = RecordingModel()
    kept.load(2, "b", source)


@pytest.mark.parametrize("source", ["~nosuchuser/x", "/" + 3000 * "x/"])
def test_odd_sources(store: AdapterStore, source: str) -> None:
    """A path that the system refuses is the client's mistake."""
    with pytest.raises((InvalidArgument, NotFound), match="adapter a"):
        store.load(1, "a", source)


def test_placing(store: AdapterStore, tmp_path: Path) -> None:
    """Only adapters on the host are placed, in slots that exist; the end of the plans empties the slots."""
    store.load(5, "a", str(_write(tmp_path)))
    store.place(1, 5)
    model: Any = store._model
    assert set(model.placed[1]) == {PATH}
    store.check_placed(1)
    for slot, adapter_id, text in ((2, 5, "there are 2 slots"), (-1, 5, "there are 2"), (0, 6, "adapter 6")):
        with pytest.raises(Internal, match=text):
            store.place(slot, adapter_id)
    with pytest.raises(Internal, match="adapter slot 0, which is empty"):
        store.check_placed(0)
    store.unload(5)
    store.check_placed(1)  # what is on the device stays
    store.forget_placements()
    with pytest.raises(Internal, match="slot 1, which is empty"):
        store.check_placed(1)


@pytest.mark.parametrize("source", ["/nowhere/adapter", "./nowhere", "nowhere", "a/b/c"])
def test_missing_folders(store: AdapterStore, source: str) -> None:
    """A source that is neither a folder nor an id is named."""
    with pytest.raises(NotFound, match=f"adapter a: there is no folder {source}"):
        store.load(1, "a", source)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)  # fmt: skip
def test_short_memory_may_pass(tmp_path: Path, error: Exception) -> None:
    """The adapter is not at fault: the scheduler tries again."""

    class Short(RecordingModel):
        def fit(self, checkpoint: AdapterCheckpoint) -> Mapping[str, LayerWeights]:
            raise error

    kept = AdapterStore(LoraLimits(max_loras=1, max_rank=8, max_cpu_loras=1), Short())
    source = str(_write(tmp_path))
    with pytest.raises(Overloaded, match="no memory left for adapter a"):
        kept.load(1, "a", source)
    with pytest.raises(Internal, match="not on the host"):
        kept.place(0, 1)
    kept._model = RecordingModel()
    kept.load(1, "a", source)
