"""A worker's adapters: found in a folder or on the hub, kept on the host, placed in slots of the device."""

import errno
import os
import re
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from protos.errors import Internal, InvalidArgument, NotFound, Overloaded, TriptychError, Unavailable
from worker_svc.devices.lora_stack import LayerWeights
from worker_svc.lora.checkpoint import CONFIG, WEIGHTS, AdapterCheckpoint, LoraLimits, read_adapter

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

# A branch, tag or commit; nothing that leaves the hub's cache.
_REVISION = re.compile(r"(?!.*\.\.)[\w][\w./-]{0,255}")

# What the system answers to a process that may not write a folder, or finds no space there.
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class AdapterFiles:
    """Where an adapter's files are."""

    folder: Path
    """Has the configuration and the weights."""
    revision: str = ""
    """The commit of a hub's adapter; empty for a folder."""


def find_files(source: str, name: str, revision: str = "") -> AdapterFiles:
    """Returns an adapter's files, fetched if the source is an id of the hub.

    Args:
        source: a folder, or an id with or without a branch, tag or commit: ``org/adapter@revision``.
        name: the adapter's, for errors.
        revision: the commit to read instead, if the source is an id; empty: the source's.

    Raises:
        NotFound: if nothing is there.
        InvalidArgument: if the source is neither a path nor an id.
        Unavailable: if the hub cannot be reached, or its cache on this machine cannot be written.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return AdapterFiles(path)
    repository, at, wanted = source.partition("@")
    if source.startswith(("/", ".", "~")) or repository.count("/") != 1:
        raise NotFound(f"adapter {name}: there is no folder {source} on the worker", param="source")
    if at and not _REVISION.fullmatch(wanted):
        raise InvalidArgument(
            f"adapter {name}: {wanted!r} in {source} is not a branch, tag or commit", param="source"
        )
    folder = _download(repository, revision or wanted, source, name)
    return AdapterFiles(folder, folder.name)  # the hub's cache has a folder for each commit


def _download(repository: str, revision: str, source: str, name: str) -> Path:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    try:
        return Path(
            snapshot_download(repository, revision=revision or None, allow_patterns=[CONFIG, WEIGHTS])
        )
    except HFValidationError as error:
        raise InvalidArgument(
            f"adapter {name}: {source} is neither a folder nor a Hugging Face id", param="source"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, httpx.HTTPError, OSError) as error:
        causes = (error, error.__cause__)
        number = next((one.errno for one in causes if isinstance(one, OSError) and one.errno), 0)
        if number in _NOT_WRITABLE:
            raise Unavailable(
                f"adapter {name}: the worker cannot write the hub's cache ({os.strerror(number)}); let it write"
                " there, free space, or set HF_HUB_CACHE to another folder",
                param="source",
                retry_after_ms=5000,
            ) from error
        if any(isinstance(cause, HfHubHTTPError) and _is_refusal(cause) for cause in causes):
            reason = f"{source} is not a folder, and the hub does not have it"
        elif any(isinstance(cause, OfflineModeIsEnabled) for cause in causes):
            reason = f"{source} is not a folder, the hub's cache does not have it, and HF_HUB_OFFLINE is set"
        else:
            raise Unavailable(
                f"adapter {name}: {source} is not a folder, and the hub cannot be reached; retry,"
                " or pass a folder",
                param="source",
                retry_after_ms=5000,
            ) from error
        raise NotFound(f"adapter {name}: {reason}", param="source") from error


def _is_refusal(error: "HfHubHTTPError") -> bool:
    return error.response.status_code in (401, 403, 404)


class AdaptedModel(Protocol):
    """A model whose layers take adapters; `AdaptedLayers` in `vllm_adapter` implements it."""

    def fit(self, checkpoint: AdapterCheckpoint) -> Mapping[str, LayerWeights]:
        """Returns this rank's matrices by layer; raises InvalidArgument if they do not suit the model."""
        ...

    def place(self, slot: int, matrices: Mapping[str, LayerWeights]) -> None:
        """Writes an adapter to a slot of the device, over its predecessor."""
        ...

    def select(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns a graph's input from the rows' adapter slots, int32 [tokens]."""
        ...


@dataclass(frozen=True)
class HostAdapter:
    """An adapter in the host's memory."""

    name: str
    """For logs and errors."""
    source: str
    """Where it was read."""
    rank: int
    """The highest rank of its matrices."""
    digest: str
    """Equal for adapters that compute the same."""
    layers: Mapping[str, LayerWeights]
    """This rank's matrices by layer."""
    num_bytes: int
    """Memory of the matrices."""
    revision: str = ""
    """The commit at which the hub had it; empty for a folder."""
    base_model: str = ""
    """The folder or id of its base model, as the trainer wrote it; may be empty."""


class AdapterStore:
    """A worker's adapters by the scheduler's ids: on the host, and in slots of the device.

    Each forgets the adapter used least recently for another one. Any thread may load. Everything else is for
    the model thread, so that all ranks change alike.
    """

    def __init__(self, limits: LoraLimits, model: AdaptedModel) -> None:
        """Starts empty."""
        self.limits = limits
        """How many adapters the worker holds."""
        self.num_placements = 0
        """Copies to the device."""
        self._model = model
        self._lock = threading.Lock()
        # The least recently used first.
        self._on_host: dict[int, HostAdapter] = {}
        # Adapters that are being read; unloading one ends its claim to a place.
        self._reading: set[int] = set()
        # Slots by adapter, the least recently used first, and the adapters of admitted requests by row.
        self._slots: dict[int, int] = {}
        self._rows: dict[int, int] = {}

    # ---- the host ----

    def displaced(self, needed: Collection[int]) -> list[int]:
        """Returns the adapters to unload before another one has room on the host.

        Raises:
            Overloaded: if too many are `needed` there.
        """
        with self._lock:
            excess = len(self._on_host) + len(self._reading) + 1 - self.limits.max_cpu_loras
            idle = [one for one in self._on_host if one not in needed]
        if excess > len(idle):
            raise Overloaded(
                f"requests use all {self.limits.max_cpu_loras} adapters that the worker holds; retry later,"
                " or raise --max-cpu-loras",
                retry_after_ms=5000,
            )
        return idle[: max(0, excess)]

    def reserve(self, adapter_id: int) -> None:
        """Takes a place on the host for an adapter that is about to be read."""
        with self._lock:
            self._reading.add(adapter_id)

    def load(self, adapter_id: int, name: str, source: str, revision: str = "") -> HostAdapter:
        """Reads an adapter that has a place, and fits it to the model. Takes as long as the disk.

        Raises:
            NotFound: if the adapter does not exist.
            InvalidArgument: if it does not fit the model or the settings.
            Overloaded: if the host is out of memory.
            Unavailable: if it was unloaded meanwhile, the hub cannot be reached, or its cache not written.
        """
        try:
            checkpoint, layers, found = self._read(name, source, revision)
        except BaseException:
            self._reading.discard(adapter_id)
            raise
        num_bytes = sum(
            matrix.nbytes for parts in layers.values() for pair in parts if pair for matrix in pair
        )
        loaded = HostAdapter(
            name, source, checkpoint.rank, checkpoint.digest, layers, num_bytes, found, checkpoint.base_model
        )
        with self._lock:
            if adapter_id not in self._reading:
                raise Unavailable(f"adapter {name} was unloaded while it was read")
            self._reading.discard(adapter_id)
            self._on_host[adapter_id] = loaded
        return loaded

    def _read(
        self, name: str, source: str, revision: str
    ) -> tuple[AdapterCheckpoint, Mapping[str, LayerWeights], str]:
        try:
            files = find_files(source, name, revision)
            checkpoint = read_adapter(files.folder, name=name, max_rank=self.limits.max_rank)
            return checkpoint, self._model.fit(checkpoint), files.revision
        except TriptychError:
            raise
        except (OSError, ArithmeticError, MemoryError, RecursionError, RuntimeError, ValueError) as error:
            if _is_out_of_memory(error):
                raise Overloaded(
                    f"the worker has no memory left for adapter {name}; retry later, or lower --max-cpu-loras",
                    retry_after_ms=5000,
                ) from error
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise InvalidArgument(f"adapter {name} cannot be read: {reason[0]}", param="source") from error

    def unload(self, adapter_id: int) -> None:
        """Forgets an adapter on the host, or ends its load. Does nothing for an unknown id."""
        with self._lock:
            self._reading.discard(adapter_id)
            self._on_host.pop(adapter_id, None)

    def forget(self) -> None:
        """Forgets all adapters on the host: a scheduler configures the worker, and ids are its own."""
        with self._lock:
            self._reading.clear()
            self._on_host.clear()

    # ---- the device ----

    def place(self, adapter_id: int) -> int:
        """Returns the device's slot of an adapter, which is copied there unless it is there.

        Raises:
            Unavailable: if the adapter is not on the host.
            Internal: if admitted requests use all slots.
        """
        slot = self._slots.get(adapter_id)
        if slot is not None:
            return slot
        adapter = self._on_host.get(adapter_id)
        if adapter is None:
            raise Unavailable("the adapter is not on the host; load it again", param="adapter_id")
        slot = self._free_slot()
        self._model.place(slot, adapter.layers)
        self._slots[adapter_id] = slot
        self.num_placements += 1
        return slot

    def _free_slot(self) -> int:
        taken = set(self._slots.values())
        for slot in range(self.limits.max_loras):
            if slot not in taken:
                return slot
        for adapter_id in self._slots:
            if adapter_id not in self._rows.values():
                return self._slots.pop(adapter_id)
        raise Internal(f"the plan admits requests of more than {self.limits.max_loras} adapters")

    def use(self, row: int, adapter_id: int) -> None:
        """Keeps a placed adapter in its slot until its request's row is released."""
        self._rows[row] = adapter_id
        self._slots[adapter_id] = self._slots.pop(adapter_id)
        with self._lock:
            if (adapter := self._on_host.pop(adapter_id, None)) is not None:
                self._on_host[adapter_id] = adapter

    def release(self, row: int) -> None:
        """Ends the use of an adapter by the request in a row, if it has one."""
        self._rows.pop(row, None)

    def forget_slots(self) -> None:
        """Forgets the contents of the device's slots, at the end of a scheduler's plans."""
        self._slots.clear()
        self._rows.clear()

    def select(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns a graph's input from the rows' adapter slots, int32 [tokens]."""
        return self._model.select(slots)


def _is_out_of_memory(error: Exception) -> bool:
    """Whether an error reports short memory; torch lacks a type for the host's."""
    return (
        isinstance(error, MemoryError | torch.OutOfMemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError) and "allocate memory" in str(error))
    )
