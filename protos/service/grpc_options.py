"""Constants of every connection: the schema's revision, message limits and keepalive."""

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import quote

import grpc.aio

from protos.errors import MAX_METADATA_BYTES
from protos.triptych.v1 import common_pb2

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
"""A servicer's method, as interceptors return it."""
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]"
"""The rest of the chain of interceptors."""

# Increase it whenever an older peer would misread a message or lack a call. Peers exchange it when they
# connect (Register, Describe, the first message of Connect) and refuse other revisions with SCHEMA_MISMATCH.
# A refused peer tries again, because an upgrade replaces one service after the other.
SCHEMA_REVISION: Final = 11

# The header that a scheduler sends at once on a Connect stream of its own revision.
ACCEPTED_HEADER: Final = ("triptych-schema-revision", str(SCHEMA_REVISION))

# Longest message that a peer accepts. A prompt of a million token ids has about 3 MB.
MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024

# Approximate size at which a stream continues in another message. Stays below the 4 MiB that gRPC clients
# accept by default, even after the last addition.
FULL_MESSAGE_BYTES: Final = 1024 * 1024

# Largest piece of a streamed file.
FILE_CHUNK_BYTES: Final = 512 * 1024

_LIMITS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)

# Notice a peer that vanished without a FIN (a pulled cable, a stopped container) within about 15 s.
_KEEPALIVE: Final = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # The timeout above is not heeded on its own: a peer that was frozen was noticed after 70 s.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

CHANNEL_OPTIONS: Final = (
    *_LIMITS,
    *_KEEPALIVE,
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    # Find a restarted peer quickly; the default backs off to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # How long one attempt may take, 20 s by default: perhaps no machine has the address any more.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    # A recreated container has another address; by itself, gRPC asks for it every 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # A proxy from the environment must not carry traffic inside a cluster.
    ("grpc.enable_http_proxy", 0),
)

SERVER_OPTIONS: Final = (
    *_LIMITS,
    *_KEEPALIVE,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Otherwise a second server on the port would get half of the connections.
    ("grpc.so_reuseport", 0),
)


# Longest path of a Unix socket on Linux, bytes.
MAX_SOCKET_PATH_BYTES: Final = 107


def unix_address(path: Path) -> str:
    """Returns the address of a Unix socket, ``unix:...``, as channels and servers of gRPC read it."""
    return f"unix:{quote(str(path))}"


def is_unix(address: str) -> bool:
    """Whether an address is a Unix socket's."""
    return address.startswith("unix:")


def open_channel(address: str) -> grpc.aio.Channel:
    """Opens a channel to ``host:port`` or ``unix:path`` with the options of every Triptych client."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def file_chunks(name: str, data: bytes) -> Iterator[common_pb2.FileChunk]:
    """Yields a file in messages; an empty file gives a single message."""
    for start in range(0, max(len(data), 1), FILE_CHUNK_BYTES):
        end = start + FILE_CHUNK_BYTES
        yield common_pb2.FileChunk(name=name, data=data[start:end], last=end >= len(data))
