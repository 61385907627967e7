"""A channel that sends the service token and follows changes of the certificate files."""

import asyncio
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, Self

import grpc.aio

from protos.security.token_check import METADATA_KEY
from protos.security.tokens import ServiceTokens

# Calls on a channel with old certificates may run as long as they like.
_LONG_S: Final = 1e9


class SecuredChannel(grpc.aio.Channel):
    """Passes calls on to a plain channel of gRPC, and replaces it after changes of the certificates.

    Running calls stay on their channel.
    """

    def __init__(
        self,
        connect: Callable[[], grpc.aio.Channel],
        version: Callable[[], int],
        tokens: ServiceTokens | None,
    ) -> None:
        """Opens the first channel.

        Args:
            connect: opens a channel with the current certificates.
            version: returns another number once the certificates have changed.
            tokens: the token to send; `None` for none.
        """
        self._connect = connect
        self._version = version
        self._tokens = tokens
        self._seen = version()
        self._channel = connect()
        self._retired: set[asyncio.Task[None]] = set()
        self._calls: weakref.WeakSet[Any] = weakref.WeakSet()

    def current(self) -> grpc.aio.Channel:
        """Returns the channel for new calls."""
        version = self._version()
        if version != self._seen:
            self._seen = version
            self._retire(self._channel)
            self._channel = self._connect()
        return self._channel

    def _retire(self, old: grpc.aio.Channel) -> None:
        """Closes a channel once its calls have ended."""
        task = asyncio.get_running_loop().create_task(old.close(_LONG_S))
        self._retired.add(task)
        task.add_done_callback(self._retired.discard)

    def track(self, call: Any) -> None:
        """Remembers a call, to cancel it when the channel closes."""
        self._calls.add(call)

    def with_token(self, metadata: Any) -> Any:
        """Returns a call's metadata with the token."""
        if self._tokens is None:
            return metadata
        return (*(metadata or ()), (METADATA_KEY, self._tokens.authorization))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Closes all channels, after ``grace`` seconds at most, and cancels running calls."""
        await self._channel.close(grace)
        for call in list(self._calls):
            call.cancel()
        await asyncio.gather(*self._retired)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Returns the state of the channel for new calls."""
        return self.current().get_state(try_to_connect=try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Waits for another state of the channel for new calls."""
        await self.current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Waits until the channel for new calls is connected."""
        await self.current().channel_ready()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """Returns a method from a message to a message."""
        return _Method(self, "unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """Returns a method from a message to several messages."""
        return _Method(self, "unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        """Returns a method from several messages to a message."""
        return _Method(self, "stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """Returns a method that takes and returns several messages."""
        return _Method(self, "stream_stream", args, kwargs)


class _Method:
    """A method of a service, called on whichever channel is current."""

    def __init__(
        self, channel: SecuredChannel, kind: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        self._channel = channel
        self._kind = kind
        self._args = args
        self._kwargs = kwargs
        self._on: grpc.aio.Channel | None = None
        self._method: Callable[..., Any]

    def __call__(self, *args: Any, metadata: Any = None, **kwargs: Any) -> Any:
        channel = self._channel.current()
        if channel is not self._on:
            self._on = channel
            self._method = getattr(channel, self._kind)(*self._args, **self._kwargs)
        call = self._method(*args, metadata=self._channel.with_token(metadata), **kwargs)
        self._channel.track(call)
        return call
