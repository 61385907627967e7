"""Changes of all prefix caches for a WatchKvEvents stream: buffered and converted to messages."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator

from protos.errors import Unavailable
from protos.service.grpc_options import FULL_MESSAGE_BYTES
from protos.triptych.v1 import inference_pb2
from scheduler_svc.engine.prefix_control import KvChange
from scheduler_svc.kv.events import Batch, KvEvent, Removed, Stored

# Most unread batches of a watcher.
_MAX_BEHIND = 10_000

Follow = Callable[[Callable[[KvChange], None]], Callable[[], None]]
"""Subscribes a listener and returns a function to end the subscription."""


@contextlib.contextmanager
def watch_kv_events(follow: Follow, *, max_behind: int = _MAX_BEHIND) -> Iterator[AsyncIterator[KvChange]]:
    """Buffers changes while the block runs and yields an iterator over them.

    A slow watcher gets an error rather than a stream with gaps; it can resume from its last batch.

    Args:
        follow: :meth:`scheduler_svc.engine.prefix_control.PrefixControl.follow`.
        max_behind: most unread batches. Beyond it, the iterator raises :class:`protos.errors.Unavailable`.
    """
    # None ends the changes of a slow watcher.
    unread: asyncio.Queue[KvChange | None] = asyncio.Queue(max_behind)
    is_cut = False

    def add(change: KvChange) -> None:
        nonlocal is_cut
        if unread.full():
            is_cut = True
            while not unread.empty():
                unread.get_nowait()
            unread.put_nowait(None)
        elif not is_cut:
            unread.put_nowait(change)

    async def changes() -> AsyncIterator[KvChange]:
        while (change := await unread.get()) is not None:
            yield change
        raise Unavailable(
            f"more than {max_behind} batches of KV events were not read in time; watch again",
            retry_after_ms=100,
        )

    stop = follow(add)
    try:
        yield changes()
    finally:
        stop()


# With one or two chunks of tokens under each key, a message stays below the limit of any client.
_KEYS_PER_MESSAGE = 4096


def kv_batch_to_proto(
    replica_id: str, batch: Batch, hash_block_size: int
) -> Iterator[inference_pb2.KvEventBatch]:
    """Yields the messages of a batch of changes; each is below the message limit of any client."""
    part = inference_pb2.KvEventBatch(sequence=batch.sequence, replica_id=replica_id, snapshot=batch.snapshot)
    size = 0
    for event in itertools.chain.from_iterable(_to_proto(event, hash_block_size) for event in batch.events):
        num_bytes = event.ByteSize()
        if part.events and size + num_bytes > FULL_MESSAGE_BYTES:
            part.more = True
            yield part
            part, size = inference_pb2.KvEventBatch(sequence=batch.sequence, replica_id=replica_id), 0
        part.events.append(event)
        size += num_bytes
    yield part


def _to_proto(event: KvEvent, hash_block_size: int) -> Iterator[inference_pb2.KvEvent]:
    """Yields an event in pieces of a bounded number of keys; each piece continues its predecessor."""
    match event:
        case Stored(group_id, keys, parent, token_ids, lora_name):
            for start in range(0, max(1, len(keys)), _KEYS_PER_MESSAGE):
                end = start + _KEYS_PER_MESSAGE
                before = keys[start - 1] if start and parent is not None else parent
                stored = inference_pb2.KvStored(
                    group_id=group_id,
                    hashes=keys[start:end],
                    parent_hash=before or b"",
                    token_ids=token_ids[start * hash_block_size : end * hash_block_size],
                    tokens_per_hash=hash_block_size,
                    lora_name=lora_name,
                )
                yield inference_pb2.KvEvent(stored=stored)
        case Removed(group_id, keys):
            for start in range(0, len(keys), _KEYS_PER_MESSAGE):
                removed = inference_pb2.KvRemoved(
                    group_id=group_id, hashes=keys[start : start + _KEYS_PER_MESSAGE]
                )
                yield inference_pb2.KvEvent(removed=removed)
        case _:
            yield inference_pb2.KvEvent(cleared=inference_pb2.KvCleared())
