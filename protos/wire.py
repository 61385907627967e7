"""What both ends of a connection agree on: the schema's revision, message limits and keepalive."""

from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import grpc.aio

from protos.triptych.v1 import common_pb2

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
"""A call, as a servicer's method sees it."""

# Raised whenever a message changes its meaning in a way that an older peer would misread. Exchanged at connect
# (Register, Describe, the first message of Connect); unequal revisions are refused with SCHEMA_MISMATCH.
SCHEMA_REVISION: Final = 4

# Longest message either end accepts. A prompt of a million token ids is about 3 MB.
MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024

# Bytes, roughly, beyond which what is left to say goes into another message of a stream. Below the 4 MiB that gRPC's clients take unless
# told otherwise, whatever is added last.
FULL_MESSAGE_BYTES: Final = 1024 * 1024

# Largest piece of a streamed file.
FILE_CHUNK_BYTES: Final = 512 * 1024

_LIMITS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)

# A dead peer without a FIN (a pulled cable, a stopped container) is noticed within about 15 s, also on an idle connection.
_KEEPALIVE: Final = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

CHANNEL_OPTIONS: Final = (
    *_LIMITS,
    *_KEEPALIVE,
    # A restarted peer is found again quickly; the default backs off to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Inside a cluster an HTTP proxy from the environment is never what is wanted.
    ("grpc.enable_http_proxy", 0),
)

SERVER_OPTIONS: Final = (
    *_LIMITS,
    *_KEEPALIVE,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Two servers on one port would each get half of the connections.
    ("grpc.so_reuseport", 0),
)


def open_channel(address: str) -> grpc.aio.Channel:
    """Opens a channel to ``address`` (``host:port``) with the options that every Triptych client uses."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def file_chunks(name: str, data: bytes) -> Iterator[common_pb2.FileChunk]:
    """Cuts a file into messages; an empty file is one message."""
    for start in range(0, max(len(data), 1), FILE_CHUNK_BYTES):
        end = start + FILE_CHUNK_BYTES
        yield common_pb2.FileChunk(name=name, data=data[start:end], last=end >= len(data))
