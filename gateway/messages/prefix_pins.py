"""Pins of the prefixes that clients mark, each for a time: a lease, which the scheduler keeps.

A hint never delays or fails a request: it is followed after the answer, when the prefix is in the cache. Each
tenant holds a bounded number of pins, and the scheduler bounds the memory of all of them.
"""

import asyncio
import hashlib
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

from gateway.keys.caller import Account
from gateway.scheduler_link.client import InferenceClient
from protos.errors import TriptychError
from protos.logs import get_logger
from protos.triptych.v1 import inference_pb2 as inference

# Pins of all tenants together: without keys, a client may name any number of tenants.
_MAX_PINS: Final = 1000


class Prefix(NamedTuple):
    """Tokens to pin."""

    token_ids: Sequence[int]
    ttl_s: int


class _Pin(NamedTuple):
    pin_id: str
    num_tokens: int
    digest: bytes
    """Of all that tells one prefix from another."""
    expires_s: float


class PrefixPins:
    """The pins that this gateway holds."""

    def __init__(self, client: InferenceClient, most: int, clock: Callable[[], float]) -> None:
        """Starts without pins.

        Args:
            client: the client of the scheduler.
            most: pins that each tenant may hold; 0: hints are ignored.
            clock: monotonic seconds.
        """
        self._client = client
        self._most = most
        self._clock = clock
        self._held: dict[str, list[_Pin]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._log = get_logger()

    @property
    def enabled(self) -> bool:
        """Whether hints are followed."""
        return self._most > 0

    def follow(
        self, account: Account, lora_name: str, find: Callable[[], Awaitable[Sequence[Prefix]]]
    ) -> None:
        """Pins prefixes in the background; only logs it where that is not possible.

        Args:
            account: whose pins they are, and the salt of its prefixes.
            lora_name: the adapter that computes them; empty: the model itself.
            find: returns the prefixes.
        """
        if account.tenant in self._tasks:
            # The tenant's next request has the hint, too.
            self._log.debug("a cache_control hint is ignored: the tenant's last one is being followed")
            return
        task = asyncio.create_task(self._follow(account, lora_name, find), name="pin-prefix")
        self._tasks[account.tenant] = task
        task.add_done_callback(lambda _: self._tasks.pop(account.tenant, None))

    async def close(self) -> None:
        """Ends the work under way. Pins end when their time is over."""
        for task in self._tasks.values():
            task.cancel()
        await self.settled()

    async def settled(self) -> None:
        """Waits until every hint so far is followed or ignored."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _follow(
        self, account: Account, lora_name: str, find: Callable[[], Awaitable[Sequence[Prefix]]]
    ) -> None:
        try:
            for prefix in await find():
                await self._pin(account, lora_name, prefix)
        except TriptychError as error:
            self._log.debug("a cache_control hint is ignored", reason=str(error))
        except Exception:  # noqa: BLE001 - nobody awaits the task
            self._log.exception("a cache_control hint could not be followed")

    async def _pin(self, account: Account, lora_name: str, prefix: Prefix) -> None:
        """Pins one prefix; the pins of its own beginnings, which it outlives, end."""
        now, data = self._clock(), array("I", prefix.token_ids)
        self._forget_expired(now)
        held = self._held.setdefault(account.tenant, [])
        until = now + prefix.ttl_s

        def digest(count: int) -> bytes:
            names = f"{account.cache_salt}\0{lora_name}\0".encode()
            return hashlib.sha256(names + data[:count].tobytes()).digest()

        covered = [
            pin
            for pin in held
            if pin.num_tokens <= len(data) and pin.expires_s <= until and pin.digest == digest(pin.num_tokens)
        ]
        if any(pin.num_tokens == len(data) and pin.expires_s - now > prefix.ttl_s / 2 for pin in covered):
            return  # it is pinned, and not in need of more time yet
        others = [pin for pin in held if pin not in covered]
        if len(others) >= self._most:
            await self._end(account.tenant, min(others, key=lambda pin: pin.expires_s))
        elif sum(map(len, self._held.values())) - len(covered) >= _MAX_PINS:
            self._log.debug(
                "a cache_control hint is ignored: other tenants hold too many pins", pins=_MAX_PINS
            )
            return
        response = await self._client.pin_prefix(
            inference.PinPrefixRequest(
                prompt_token_ids=prefix.token_ids,
                cache_salt=account.cache_salt,
                lora_name=lora_name,
                ttl_s=prefix.ttl_s,
            )
        )
        self._held.setdefault(account.tenant, []).append(
            _Pin(response.pin_id, len(data), digest(len(data)), until)
        )
        self._log.debug(
            "pinned a prefix", tokens=response.num_tokens, ttl_s=prefix.ttl_s, replica=response.replica_id
        )
        for pin in covered:
            await self._end(account.tenant, pin)

    async def _end(self, tenant: str, pin: _Pin) -> None:
        if pin in (held := self._held.get(tenant, [])):  # it may have expired meanwhile
            held.remove(pin)
        await self._client.unpin_prefix(pin.pin_id)

    def _forget_expired(self, now: float) -> None:
        for tenant, pins in list(self._held.items()):
            if left := [pin for pin in pins if pin.expires_s > now]:
                self._held[tenant] = left
            else:
                del self._held[tenant]
