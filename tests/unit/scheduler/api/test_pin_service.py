"""Pin requests: what ends them, and what they leave behind."""

import asyncio
from collections.abc import Callable

import pytest

from protos.errors import Aborted, ContextExceeded, InvalidArgument, Overloaded, TriptychError
from scheduler_svc.api.pin_service import Pinned, PinService
from scheduler_svc.dispatch.pinned_prefixes import MAX_PINS
from scheduler_svc.kv.sequence import HashChain
from tests.support.scheduler.factories import Rig, make_rig


def pinning(pins: PinService, *, ttl_s: float = 1000.0) -> asyncio.Task[Pinned]:
    """Starts to pin a prompt of 16 tokens."""
    return asyncio.create_task(pins.pin(tuple(range(5, 21)), cache_salt="", ttl_s=ttl_s))


async def pinned(rig: Rig, pins: PinService) -> Pinned:
    """Pins a prompt of 16 tokens."""
    task = pinning(pins)
    await asyncio.sleep(0)
    rig.run()
    return await task


@pytest.mark.parametrize("ends_first", [True, False])
async def test_a_pin_request_that_is_cancelled_at_the_last_moment_leaves_nothing(ends_first: bool) -> None:
    """Its prefill ends and it is cancelled, in either order: neither a pin nor a timer remains."""
    rig = make_rig()
    pins = PinService(rig)
    task = pinning(pins)
    await asyncio.sleep(0)
    for end in (rig.run, task.cancel) if ends_first else (task.cancel, rig.run):
        end()
    assert rig.engine.pinned.count("replica-0") == 1
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert (rig.engine.pinned.count("replica-0"), pins._timers, rig.scheduler.kv.usage) == (0, {}, 0)


@pytest.mark.parametrize(
    "end",
    [
        lambda rig: rig.engine.prefixes.reset(),
        lambda rig: rig.engine.drop_pins(rig.scheduler),
        lambda rig: rig.replace_replica(),
    ],
)
async def test_the_timer_of_a_pin_ends_with_the_pin(end: Callable[[Rig], object]) -> None:
    """A reset, an out-of-memory request and a lost replica all end the pin."""
    rig = make_rig()
    pins = PinService(rig)
    one = await pinned(rig, pins)
    timer = pins._timers[one.pin_id]
    end(rig)
    assert timer.cancelled()
    assert not pins._timers
    assert not pins.unpin(one.pin_id)


async def test_a_replica_keeps_a_thousand_pins() -> None:
    """One more is refused as OVERLOADED, however small, until another ends."""
    rig = make_rig()
    pins = PinService(rig)
    first = await pinned(rig, pins)
    for _ in range(MAX_PINS - 1):
        await pinning(pins)
    with pytest.raises(Overloaded, match="1000 prefixes are pinned"):
        await pinning(pins)
    assert len(pins._timers) == MAX_PINS
    assert pins.unpin(first.pin_id)
    assert (await pinning(pins)).num_tokens == 16
    rig.engine.prefixes.reset()
    assert not pins._timers


async def test_a_pin_request_fails_if_its_prefill_is_aborted() -> None:
    """No block stays pinned or in use."""
    rig = make_rig()
    pins = PinService(rig)
    task = pinning(pins)
    await asyncio.sleep(0)
    (request,) = rig.scheduler._slots.requests
    rig.engine.abort(request.request_id)
    with pytest.raises(Aborted, match="was aborted"):
        await task
    rig.run()
    assert (rig.engine.pinned.count("replica-0"), pins._timers, rig.scheduler.kv.usage) == (0, {}, 0)


@pytest.mark.parametrize(
    ("prompt", "error"), [((5,) * 1_000_000, ContextExceeded), ((5,) * 20 + (97,), InvalidArgument)]
)
async def test_an_impossible_prompt_is_refused_before_it_is_hashed(
    monkeypatch: pytest.MonkeyPatch, prompt: tuple[int, ...], error: type[TriptychError]
) -> None:
    """Hashing a prompt beyond the context or the vocabulary would block every stream."""

    def extend(*_: object) -> None:
        raise AssertionError("a prompt was hashed")

    monkeypatch.setattr(HashChain, "extend", extend)
    with pytest.raises(error):
        await PinService(make_rig()).pin(prompt, cache_salt="", ttl_s=5)
