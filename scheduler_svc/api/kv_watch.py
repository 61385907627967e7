"""The buffer between the prefix caches of all replicas and a WatchKvEvents stream, and its messages."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator

from protos.errors import Unavailable
from protos.service.grpc_options import FULL_MESSAGE_BYTES
from protos.triptych.v1 import inference_pb2
from scheduler_svc.dispatch.prefix_control import KvChange
from scheduler_svc.kv.events import Batch, Cleared, KvEvent, Removed, Stored

# Unread batches beyond which a watcher is cut off.
_MAX_BEHIND = 10_000

Follow = Callable[[Callable[[KvChange], None]], Callable[[], None]]
"""Subscribes a listener and returns a function that ends the subscription."""


@contextlib.contextmanager
def watch_kv_events(follow: Follow, *, max_behind: int = _MAX_BEHIND) -> Iterator[AsyncIterator[KvChange]]:
    """Buffers changes while the block runs and yields an iterator over them.

    A watcher that reads too slowly gets an error rather than a stream with gaps; it can resume from its last
    batch.

    Args:
        follow: subscribes to the changes; see
            :meth:`scheduler_svc.dispatch.prefix_control.PrefixControl.follow`.
        max_behind: unread batches beyond which the iterator raises :class:`protos.errors.Unavailable`.
    """
    buffer = _ChangeBuffer(max_behind)
    stop = follow(buffer.add)
    try:
        yield buffer.changes()
    finally:
        stop()


class _ChangeBuffer:
    def __init__(self, max_behind: int) -> None:
        self._max_behind = max_behind
        self._changes: list[KvChange] = []
        self._behind = False
        self._filled = asyncio.Event()

    def add(self, change: KvChange) -> None:
        # Check the limit here: a watcher that reads nothing never reaches the check in `changes`.
        self._behind = self._behind or len(self._changes) >= self._max_behind
        if self._behind:
            self._changes.clear()
        else:
            self._changes.append(change)
        self._filled.set()

    async def changes(self) -> AsyncIterator[KvChange]:
        while True:
            await self._filled.wait()
            self._filled.clear()
            changes, self._changes = self._changes, []
            if self._behind:
                raise Unavailable(
                    f"more than {self._max_behind} batches of KV events were not read in time; watch again",
                    retry_after_ms=100,
                )
            for change in changes:
                yield change


# With one or two chunks of tokens under each key, a message stays below the limit of any client.
_KEYS_PER_MESSAGE = 4096


def kv_batch_to_proto(
    replica_id: str, batch: Batch, hash_block_size: int
) -> Iterator[inference_pb2.KvEventBatch]:
    """Yields the messages of a batch of changes; each is below the message limit of any client."""
    part = inference_pb2.KvEventBatch(sequence=batch.sequence, replica_id=replica_id, snapshot=batch.snapshot)
    size = 0
    for event in itertools.chain.from_iterable(_pieces(event, hash_block_size) for event in batch.events):
        if part.events and size + _num_bytes(event) > FULL_MESSAGE_BYTES:
            part.more = True
            yield part
            part, size = inference_pb2.KvEventBatch(sequence=batch.sequence, replica_id=replica_id), 0
        part.events.append(_kv_event_to_proto(event, hash_block_size))
        size += _num_bytes(event)
    yield part


def _num_bytes(event: KvEvent) -> int:
    """Returns an upper estimate of an event's size on the wire, bytes."""
    if isinstance(event, Cleared):
        return 2
    return 400 + 34 * len(event.keys) + (5 * len(event.token_ids) if isinstance(event, Stored) else 0)


def _pieces(event: KvEvent, hash_block_size: int) -> Iterator[KvEvent]:
    """Splits an event into pieces with a bounded number of keys; each piece continues its predecessor."""
    match event:
        case Stored(group_id, keys, parent, token_ids, lora_name) if len(keys) > _KEYS_PER_MESSAGE:
            for start in range(0, len(keys), _KEYS_PER_MESSAGE):
                end = start + _KEYS_PER_MESSAGE
                before = keys[start - 1] if start and parent is not None else parent
                yield Stored(
                    group_id,
                    keys[start:end],
                    before,
                    token_ids[start * hash_block_size : end * hash_block_size],
                    lora_name,
                )
        case Removed(group_id, keys) if len(keys) > _KEYS_PER_MESSAGE:
            for start in range(0, len(keys), _KEYS_PER_MESSAGE):
                yield Removed(group_id, keys[start : start + _KEYS_PER_MESSAGE])
        case _:
            yield event


def _kv_event_to_proto(event: KvEvent, hash_block_size: int) -> inference_pb2.KvEvent:
    match event:
        case Stored(group_id, keys, parent, token_ids, lora_name):
            stored = inference_pb2.KvStored(
                group_id=group_id,
                hashes=keys,
                parent_hash=parent or b"",
                token_ids=token_ids,
                tokens_per_hash=hash_block_size,
                lora_name=lora_name,
            )
            return inference_pb2.KvEvent(stored=stored)
        case Removed(group_id, keys):
            return inference_pb2.KvEvent(removed=inference_pb2.KvRemoved(group_id=group_id, hashes=keys))
        case _:
            return inference_pb2.KvEvent(cleared=inference_pb2.KvCleared())
