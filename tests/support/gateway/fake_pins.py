"""Pins of a fake scheduler: it keeps them until they are removed."""

import asyncio
from typing import TYPE_CHECKING, Any

from protos import wire
from protos.errors import TriptychError, abort
from protos.triptych.v1 import inference_pb2 as inference
from protos.triptych.v1.inference_pb2_grpc import InferenceServicer

# The base class answers UNIMPLEMENTED for methods that are missing; its type insists on every method.
if TYPE_CHECKING:
    _Servicer = Any
else:
    _Servicer = InferenceServicer


class FakePins(_Servicer):  # type: ignore[misc]
    """The part of the fake scheduler that pins prefixes."""

    changed: asyncio.Condition
    pins: dict[str, inference.PinPrefixRequest]
    """The pins that are held, by id."""
    num_pins: int
    """Pins so far."""
    num_resets: int
    """Resets of the prefix cache so far."""
    refuse_pin: TriptychError | None
    """The answer to pins."""

    def reset_pins(self) -> None:
        """Forgets all pins."""
        self.pins, self.num_pins, self.refuse_pin = {}, 0, None
        self.num_resets = 0

    async def PinPrefix(
        self, request: inference.PinPrefixRequest, context: wire.Context
    ) -> inference.PinPrefixResponse:
        if self.refuse_pin is not None:
            await abort(context, self.refuse_pin)
        self.num_pins += 1
        pin_id = str(self.num_pins)
        self.pins[pin_id] = request
        await self._notify()
        return inference.PinPrefixResponse(
            pin_id=pin_id, num_tokens=len(request.prompt_token_ids), replica_id="r0"
        )

    async def UnpinPrefix(
        self, request: inference.UnpinPrefixRequest, context: wire.Context
    ) -> inference.UnpinPrefixResponse:
        found = self.pins.pop(request.pin_id, None) is not None
        await self._notify()
        return inference.UnpinPrefixResponse(found=found)

    async def ResetPrefixCache(
        self, request: inference.ResetPrefixCacheRequest, context: wire.Context
    ) -> inference.ResetPrefixCacheResponse:
        self.num_resets += 1
        self.pins.clear()
        await self._notify()
        return inference.ResetPrefixCacheResponse(num_replicas=1)

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()
