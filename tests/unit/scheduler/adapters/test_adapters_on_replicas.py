"""LoRA adapters and several replicas: where their requests run, and which replica loads what."""

import pytest

from protos.errors import InvalidArgument, NotFound, Overloaded, TriptychError, Unavailable
from scheduler_svc.adapters.registry import Adapter
from scheduler_svc.replica.quarantine import Loss
from tests.support.scheduler.factories import Rig, expected_tokens, make_rig, make_shapes, make_submission
from tests.support.scheduler.second_replica import Second, add_replica, run

PROMPT = (5, 6, 7)


def two_replicas(*names: str, slots: int = 2, hosts: int = 4) -> tuple[Rig, Second]:
    """Returns two replicas with two request slots each; the first has the adapters, the second none."""
    rig = make_rig(make_shapes(max_num_seqs=2, buckets=(1, 2)), adapter_slots=slots, max_cpu_loras=hosts)
    for name in names:
        assert isinstance(rig.load_adapter(name), Adapter)
    second = add_replica(rig, adapter_slots=slots, max_cpu_loras=hosts)
    return rig, second


def submit(rig: Rig, name: str, lora_name: str) -> None:
    rig.submit(make_submission(PROMPT, request_id=name, lora_name=lora_name))


def test_a_new_replica_loads_registered_adapters() -> None:
    """As many as its host holds; their requests may run there once they are loaded."""
    rig, second = two_replicas("a", "b", "c", slots=1, hosts=2)
    assert [adapter.name for adapter in second.loads] == ["a", "b"]
    second.answer_loads()
    rig.engine.detach("replica-0", Loss.LEFT)
    submit(rig, "r", "b")
    while second.step():
        pass
    assert rig.sinks["r"].tokens == expected_tokens(PROMPT, 8, weights="b")


def test_requests_of_an_adapter_gather_where_it_lies() -> None:
    """A replica that would have to place the adapter is chosen only if the other one is much busier."""
    rig, second = two_replicas("a", "b")
    second.answer_loads()
    submit(rig, "a0", "a")
    first = rig.engine.find("a0").replica_id  # type: ignore[union-attr]
    submit(rig, "b0", "b")
    submit(rig, "a1", "a")
    assert rig.engine.find("b0").replica_id != first  # type: ignore[union-attr]
    assert rig.engine.find("a1").replica_id == first  # type: ignore[union-attr]
    run(rig, second)


def test_another_replica_loads_the_adapter_of_a_busy_one() -> None:
    """Requests that find no slot where their adapter is have it loaded where there are slots."""
    rig, second = two_replicas("a", "b", "c", slots=1, hosts=2)
    second.answer_loads()  # it has a and b; the first has b and c
    for number in range(3):
        submit(rig, f"c{number}", "c")
    assert [adapter.name for adapter in second.loads] == ["c"]
    second.answer_loads()
    assert rig.engine.find("c2").replica_id == "replica-1"  # type: ignore[union-attr]
    run(rig, second)
    for number in range(3):
        assert rig.sinks[f"c{number}"].tokens == expected_tokens(PROMPT, 8, weights="c")


def test_requests_fail_when_no_replica_with_adapters_comes_back() -> None:
    """A replica without adapters remains: after the wait, the request fails and says why."""
    rig = make_rig(adapter_slots=1, max_cpu_loras=1)
    rig.load_adapter("a")
    add_replica(rig)
    submit(rig, "a", "a")
    rig.engine.detach("replica-0", Loss.DIED)
    assert not rig.sinks["a"].events or rig.sinks["a"].events[-1].error is None
    assert rig.engine.fail_oversized() == 1
    error = rig.sinks["a"].events[-1].error
    assert isinstance(error, Unavailable)
    assert "LoRA adapter" in error.message


def busy_with(rig: Rig, *names: str) -> None:
    """Submits requests of the adapter "a"; the first replica has two request slots."""
    for name in names:
        submit(rig, name, "a")


@pytest.mark.parametrize("error", [Unavailable("no answer within 300 s"), Overloaded("no memory is left")])
def test_a_failure_that_may_pass_is_tried_again_after_a_pause(error: TriptychError) -> None:
    """Each pause is twice as long as the one before; then the replica serves the adapter, too."""
    rig, second = two_replicas("a")
    second.answer_loads(error=error)
    busy_with(rig, "one", "two", "three")
    assert not second.loads, "the other replica serves the adapter"
    for pause_s in (5, 10):
        rig.now += pause_s - 1
        busy_with(rig, f"early {pause_s}")
        assert not second.loads
        rig.now += 1
        busy_with(rig, f"late {pause_s}")
        assert [adapter.name for adapter in second.loads] == ["a"]
        if pause_s == 5:
            second.answer_loads(error=error)
    second.answer_loads()
    assert second.scheduler.num_running == 2
    run(rig, second)
    assert all(sink.tokens == expected_tokens(PROMPT, 8, weights="a") for sink in rig.sinks.values())


@pytest.mark.parametrize("error", [InvalidArgument("rank 64 is too high"), NotFound("there is no folder")])
def test_a_refusal_lasts(error: TriptychError) -> None:
    """The replica is asked again only if the worker registers anew."""
    rig, second = two_replicas("a")
    second.answer_loads(error=error)
    rig.now += 1e6
    busy_with(rig, "one", "two", "three")
    assert not second.loads
    rig.engine.detach("replica-1", Loss.LEFT)
    again = add_replica(rig, adapter_slots=2, max_cpu_loras=4)
    assert [adapter.name for adapter in again.loads] == ["a"]


def test_a_paused_replica_loads_at_once_what_no_other_one_has() -> None:
    """The replica that served the adapter is lost: its requests do not wait for the pause."""
    rig, second = two_replicas("a")
    second.answer_loads(error=Unavailable("no answer within 300 s"))
    busy_with(rig, "one")
    rig.engine.detach("replica-0", Loss.DIED)
    assert [adapter.name for adapter in second.loads] == ["a"]
    second.answer_loads()
    while second.step():
        pass
    assert rig.sinks["one"].tokens == expected_tokens(PROMPT, 8, weights="a")


def test_a_load_that_is_tried_again_keeps_its_requests() -> None:
    """A replica that joins fails to load the adapter while another one tries again: the requests go on."""
    rig, second = two_replicas("a")
    error = Unavailable("no answer within 300 s")
    second.answer_loads(error=error)
    busy_with(rig, "one")
    rig.engine.detach("replica-0", Loss.DIED)
    third = add_replica(rig, name="replica-2", adapter_slots=2, max_cpu_loras=4)
    assert [[adapter.name for adapter in each.loads] for each in (second, third)] == [["a"], ["a"]]
    third.answer_loads(error=error)
    second.answer_loads()
    while second.step():
        pass
    assert rig.sinks["one"].tokens == expected_tokens(PROMPT, 8, weights="a")


def test_a_reason_that_may_pass_outweighs_a_refusal() -> None:
    """One replica has refused the adapter for good, another may have it later: the client may retry."""
    rig, second = two_replicas("a", hosts=2)
    second.answer_loads(error=Unavailable("the disk is away"))
    rig.sources["a"] = NotFound("there is no folder")
    rig.engine.detach("replica-0", Loss.DIED)
    third = add_replica(rig, name="replica-2", adapter_slots=2, max_cpu_loras=2)
    submit(rig, "one", "a")
    second.answer_loads(error=Unavailable("the disk is away"))
    third.answer_loads(error=NotFound("there is no folder"))
    failed = rig.sinks["one"].events[-1].error
    assert isinstance(failed, Unavailable)
    assert failed.message == "no worker could load the adapter 'a': the disk is away"


def test_requests_do_not_wait_for_ever_for_replicas_that_fail_in_turn() -> None:
    """Both fail so slowly that the other's pause is over by then: the requests get the reason."""
    rig, second = two_replicas("a", hosts=2)
    error = Unavailable("no answer within 300 s")
    second.answer_loads(error=error)
    rig.sources["a"] = error
    rig.engine.detach("replica-0", Loss.DIED)
    submit(rig, "one", "a")
    rig.start()
    rig.now += 300
    second.answer_loads(error=error)
    rig.now += 300
    rig.answer_loads()
    assert not second.loads
    failed = rig.sinks["one"].events[-1].error
    assert isinstance(failed, Unavailable)
    assert "no answer within 300 s" in failed.message


LONG_PROMPT = tuple(range(3, 33))


def small_and_large(*, slots_of_large: int = 2) -> tuple[Rig, Second]:
    """Returns a replica that has the adapter "a", and a new one that alone has room for `LONG_PROMPT`."""
    rig = make_rig(num_blocks=6, adapter_slots=2, max_cpu_loras=2)
    assert isinstance(rig.load_adapter("a"), Adapter)
    return rig, add_replica(rig, adapter_slots=slots_of_large, max_cpu_loras=2)


def submit_long(rig: Rig, name: str) -> None:
    rig.submit(make_submission(LONG_PROMPT, request_id=name, max_tokens=4, lora_name="a"))


@pytest.mark.parametrize("error", [Unavailable("no answer within 300 s"), NotFound("there is no folder")])
def test_a_request_too_large_for_the_replica_with_its_adapter_fails(error: TriptychError) -> None:
    """The only replica that is large enough cannot load the adapter: nothing would wake the request."""
    rig, second = small_and_large()
    submit_long(rig, "long")
    submit(rig, "short", "a")
    second.answer_loads(error=error)
    failed = rig.sinks["long"].events[-1].error
    assert isinstance(failed, type(error))
    assert error.message in failed.message
    run(rig, second)
    assert rig.sinks["short"].tokens == expected_tokens(PROMPT, 8, weights="a")


def test_a_later_request_is_not_left_to_a_pause() -> None:
    """The replica that failed to load the adapter tries again at once for what no other one can run."""
    rig, second = small_and_large()
    second.answer_loads(error=Unavailable("no answer within 300 s"))
    submit_long(rig, "long")
    assert [adapter.name for adapter in second.loads] == ["a"]
    second.answer_loads()
    run(rig, second)
    assert rig.sinks["long"].tokens == expected_tokens(LONG_PROMPT, 4, weights="a")


@pytest.mark.parametrize("slots_of_large", [0, 2])
def test_a_request_that_no_replica_with_adapters_holds_is_refused(slots_of_large: int) -> None:
    """The larger replica runs no adapters, or has refused this one for good."""
    rig, second = small_and_large(slots_of_large=slots_of_large)
    second.answer_loads(error=NotFound("there is no folder"))
    with pytest.raises(Unavailable, match="holds a request of 34 tokens and can load the adapter 'a'"):
        submit_long(rig, "long")
    assert rig.engine.num_waiting == 0
