"""Waits for a peer, and logs why it cannot be reached if waiting alone will not help."""

import asyncio
from typing import Final

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.logs import get_logger

# Certificates that are replaced meanwhile are used this soon.
_LOOK_EVERY_S: Final = 1.0
_PROBE_TIMEOUT_S: Final = 5.0

# Parts of gRPC's texts for connections that were made, and refused by one of the two ends.
_REFUSALS: Final = {
    "wrong_version_number": "the peer does not use TLS: does it have --grpc-tls-cert?",
    "verif": "the peer's certificate is not accepted: is it expired, from the CA in --grpc-tls-ca, and for"
    " this host or --grpc-tls-name?",
    "handshake failed": "no TLS connection: do both ends have current TLS libraries?",
    "secure read failed": "the peer ends the TLS connection: does it want a client certificate, from its CA and"
    " not expired (--grpc-tls-cert, --grpc-tls-key)?",
    "socket closed": "the peer ends the connection: does it use TLS (--grpc-tls-ca)?",
}


async def wait_until_ready(channel: grpc.aio.Channel, address: str) -> None:
    """Waits until a channel is connected; logs each refusal by either end once.

    A peer that is not up yet is no refusal.

    Args:
        channel: the channel.
        address: where it leads, for the log.
    """
    log, logged, watch = get_logger(address=address), set(), None
    try:
        while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                reason = await _refusal(channel)
                if reason and reason not in logged:
                    logged.add(reason)
                    log.warning("not_connected", reason=reason, retry="until it succeeds")
            if watch is None or watch.done():
                watch = asyncio.ensure_future(channel.wait_for_state_change(state))
            done, _ = await asyncio.wait({watch}, timeout=_LOOK_EVERY_S)
            for ended in done:
                ended.exception()  # of a channel that was closed meanwhile; the next look tells
    finally:
        if watch is not None:
            watch.cancel()


async def _refusal(channel: grpc.aio.Channel) -> str:
    """Returns why a connection was refused; empty if it was not."""
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=_PROBE_TIMEOUT_S)  # type: ignore[attr-defined]
    except grpc.aio.AioRpcError as error:
        text = (error.details() or "").lower()
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return next((advice for part, advice in _REFUSALS.items() if part in text), "")
    return ""
