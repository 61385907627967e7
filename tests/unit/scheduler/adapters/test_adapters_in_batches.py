"""LoRA adapters of requests: placed, shared, evicted, waited for, and kept over preemptions and losses."""

import pytest

from protos.errors import InvalidArgument, NotFound, Overloaded, TriptychError, Unavailable
from scheduler_svc.adapters.registry import Adapter
from scheduler_svc.requests.request import RequestState
from tests.support.scheduler.factories import Rig, expected_tokens, make_rig, make_shapes, make_submission

PROMPT = (5, 6, 7, 8, 9, 10)


def adapter_rig(*names: str, slots: int = 2, hosts: int = 4, **options: object) -> Rig:
    """Returns a rig with adapters that are called like their weights."""
    rig = make_rig(adapter_slots=slots, max_cpu_loras=hosts, **options)  # type: ignore[arg-type]
    for name in names:
        assert isinstance(rig.load_adapter(name), Adapter)
    return rig


def submit(rig: Rig, name: str, lora_name: str = "", *, max_tokens: int = 8, **options: object) -> None:
    rig.submit(
        make_submission(PROMPT, request_id=name, lora_name=lora_name, max_tokens=max_tokens, **options)  # type: ignore[arg-type]
    )


def check(rig: Rig, name: str, weights: str = "", max_tokens: int = 8, sequences: int = 1) -> None:
    """Checks that a request got the tokens of its adapter."""
    for sequence in range(sequences):
        wanted = expected_tokens(PROMPT, max_tokens, sequence, weights)
        assert rig.sinks[name].tokens_of(sequence) == wanted, name


def step(rig: Rig, count: int = 1) -> list[str]:
    """Runs steps; returns the requests that have ended, after each of them."""
    ended = []
    for _ in range(count):
        rig.step()
        ended += [name for name, sink in rig.sinks.items() if sink.events and sink.events[-1].finish_reason]
    return ended


def placements(rig: Rig) -> int:
    """Returns how many adapters were copied to the device."""
    assert rig.adapters is not None
    return rig.adapters.store.num_placements


def test_one_batch_mixes_the_base_and_several_adapters() -> None:
    """Each request gets the tokens of its own adapter; they decode in one batch, and each is placed once."""
    rig = adapter_rig("a", "b", "c", slots=3)
    for name in ("", "a", "b", "c"):
        submit(rig, f"r{name}", name)
    rig.run()
    for name in ("", "a", "b", "c"):
        check(rig, f"r{name}", name)
    assert placements(rig) == 3
    assert ("decode", 4) in rig.device.ran


def test_equal_weights_share_prefixes_after_a_reload() -> None:
    """The digest decides: a reload of the same files hits, other files under the same name do not."""
    rig = adapter_rig("a")
    submit(rig, "first", "a")
    rig.run()
    assert isinstance(rig.load_adapter("a", in_place=True), Adapter)
    submit(rig, "same", "a")
    rig.run()
    assert isinstance(rig.load_adapter("a", "other", in_place=True), Adapter)
    submit(rig, "other", "a")
    rig.run()
    check(rig, "same", "a")
    check(rig, "other", "other")
    cached = [
        next(e for e in rig.sinks[name].events if e.first).num_cached_tokens for name in ("same", "other")
    ]
    assert cached == [4, 0]
    assert len(rig.hosted) == 1, "replaced adapters leave the host"


def test_a_request_waits_for_a_slot_and_blocks_no_other() -> None:
    """With one adapter slot in use, the base passes the request that waits, which then runs."""
    rig = adapter_rig("a", "b", slots=1)
    submit(rig, "a", "a", max_tokens=20)
    rig.step()
    submit(rig, "b", "b")
    submit(rig, "base")
    rig.step()
    states = {name: rig.engine.find(name).state for name in ("b", "base")}  # type: ignore[union-attr]
    assert states["b"] is RequestState.WAITING
    assert states["base"] is not RequestState.WAITING
    rig.run()
    check(rig, "a", "a", 20)
    check(rig, "b", "b")
    check(rig, "base")


def test_a_request_waits_for_its_load_and_blocks_no_other() -> None:
    """While the worker loads an adapter, other requests run."""
    rig = adapter_rig("a", "b", slots=1, hosts=1)
    rig.loads_at_once = False
    submit(rig, "a", "a")
    submit(rig, "base")
    rig.run()
    check(rig, "base")
    assert rig.engine.find("a").slot is None  # type: ignore[union-attr]
    rig.answer_loads()
    rig.run()
    check(rig, "a", "a")


def test_an_adapter_that_nobody_waits_for_any_more_keeps_no_place() -> None:
    """It was loaded for a request that was aborted before it found a slot."""
    rig = adapter_rig("a", "b", slots=1, hosts=1, shapes=make_shapes(max_num_seqs=1, buckets=(1,)))
    submit(rig, "base", max_tokens=20)
    rig.step()
    submit(rig, "a", "a")
    rig.step()
    assert list(rig.hosted.values()) == ["a"]
    rig.engine.abort("a")
    submit(rig, "b", "b")
    rig.run()
    check(rig, "b", "b")


def test_an_urgent_request_preempts_the_users_of_a_slot() -> None:
    """If all slots are in use, the users of the slot with the fewest make way, if they are less urgent."""
    rig = adapter_rig("a", "b", slots=1)
    submit(rig, "low", "a", max_tokens=20, priority=1)
    submit(rig, "base", max_tokens=20, priority=1)
    rig.step()
    rig.step()
    submit(rig, "high", "b", priority=0)
    rig.step()
    assert rig.engine.find("low").state is RequestState.WAITING  # type: ignore[union-attr]
    assert rig.engine.find("base").slot is not None  # type: ignore[union-attr]
    rig.run()
    check(rig, "low", "a", 20)
    check(rig, "high", "b")


def test_unloading_an_adapter_that_is_being_loaded_makes_room_for_the_next() -> None:
    """A new replica with room for one adapter loads "a" when a request waits for "b"."""
    rig = make_rig(adapter_slots=1)
    rig.loads_at_once = False
    rig.load_adapter("a")
    rig.load_adapter("b")
    rig.replace_replica()
    sink = rig.submit(make_submission(request_id="b", lora_name="b"))
    rig.engine.adapters.unload("a")
    rig.answer_loads()
    rig.run()
    assert sink.tokens == expected_tokens([5, 6, 7], 8, weights="b")


def test_an_unloaded_adapter_serves_its_requests_to_their_end() -> None:
    """The name is free at once; the adapter leaves the host after its last request."""
    rig = adapter_rig("a", slots=1)
    submit(rig, "running", "a", max_tokens=10)
    rig.step()
    submit(rig, "waiting", "a")
    rig.engine.adapters.unload("a")
    with pytest.raises(NotFound, match="'a' is not served here"):
        submit(rig, "late", "a")
    assert rig.hosted
    rig.run()
    check(rig, "running", "a", 10)
    check(rig, "waiting", "a")
    assert not rig.hosted
    with pytest.raises(NotFound, match="no adapter is called 'a'"):
        rig.engine.adapters.unload("a")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (NotFound("there is no folder"), NotFound("there is no folder", param="model")),
        (InvalidArgument("rank 64 is too high"), InvalidArgument("rank 64 is too high", param="model")),
        ("other weights", NotFound("the files in 'a' have changed; load the adapter again with load_inplace", param="model")),
        (Unavailable("the disk is away"), Unavailable("the disk is away", retry_after_ms=5000)),
        (Overloaded("no memory is left", retry_after_ms=70), Overloaded("no memory is left", retry_after_ms=70)),
    ],
)  # fmt: skip
def test_an_adapter_that_cannot_be_loaded_again_fails_its_requests(
    changed: str | TriptychError, expected: TriptychError
) -> None:
    """The kind of the failure is the worker's, so clients retry only what may succeed; others run on."""
    rig = adapter_rig("a", "b", slots=1, hosts=1)
    rig.sources["a"] = changed
    submit(rig, "a", "a")
    submit(rig, "b", "b")
    rig.run()
    error = rig.sinks["a"].events[-1].error
    expected.message = f"no worker could load the adapter 'a': {expected.message}"
    assert error is not None
    assert error.to_proto() == expected.to_proto()
    check(rig, "b", "b")
    rig.sources["a"] = "a"
    submit(rig, "again", "a")
    rig.run()
    check(rig, "again", "a")


def test_a_name_is_loaded_once_at_a_time() -> None:
    """A second load of the name is refused until the first has ended; then the name is taken."""
    rig = adapter_rig()
    loaded: list[Adapter | TriptychError] = []
    rig.engine.adapters.load("a", "a", in_place=False, done=loaded.append)
    for in_place in (False, True):
        with pytest.raises(InvalidArgument, match="an adapter 'a' is being loaded; wait for it"):
            rig.load_adapter("a", in_place=in_place)
    rig.answer_loads()
    assert [one.name for one in loaded if isinstance(one, Adapter)] == ["a"]
    with pytest.raises(InvalidArgument, match="is loaded; unload it first"):
        rig.load_adapter("a")
