"""Priority, fairness and preemption, through an engine and its replica."""

import itertools

import pytest

from protos.steps import GroupKind
from scheduler_svc.policy.order import PriorityFairOrder
from scheduler_svc.requests.request import RequestState
from scheduler_svc.requests.sampling import FinishReason
from scheduler_svc.shapes.shape_config import KvGroup
from tests.support.scheduler.factories import (
    FULL,
    expected_tokens,
    make_rig,
    make_shapes,
    make_submission,
)

ONE_SLOT = make_shapes(max_num_seqs=1, buckets=(1,))


def test_a_more_urgent_request_preempts_a_running_one() -> None:
    """The preempted request loses no token and continues afterwards."""
    rig = make_rig(ONE_SLOT)
    late = rig.submit(make_submission(request_id="later", priority=1, max_tokens=20))
    for _ in range(5):
        rig.step()
    received = len(late.tokens)
    assert received
    urgent = rig.submit(make_submission([9, 8], request_id="urgent", max_tokens=3))
    while not urgent.events or urgent.events[-1].finish_reason is None:
        rig.step()
    assert len(late.tokens) == received
    rig.run()
    assert rig.scheduler.stats.preemptions["priority"] == 1
    assert late.tokens == expected_tokens([5, 6, 7], 20)
    assert urgent.tokens == expected_tokens([9, 8], 3)


def test_equally_urgent_requests_wait() -> None:
    """Only a difference in priority preempts."""
    rig = make_rig(ONE_SLOT)
    rig.submit(make_submission(request_id="a"))
    rig.step()
    rig.submit(make_submission([9], request_id="b"))
    rig.run()
    assert not rig.scheduler.stats.preemptions


def test_the_latest_of_the_least_urgent_is_preempted() -> None:
    """Among priorities 0, 2, 2 and 1, the second request with priority 2 is preempted."""
    rig = make_rig()
    for name, priority in (("a", 0), ("b", 2), ("c", 2), ("d", 1)):
        rig.submit(make_submission([ord(name) - 50], request_id=name, priority=priority, max_tokens=20))
    rig.submit(make_submission(request_id="urgent", priority=-1))
    waiting = [
        name for name in "abcd" if (one := rig.engine.find(name)) and one.state is RequestState.WAITING
    ]
    assert waiting == ["c"]


def test_no_request_is_preempted_in_vain() -> None:
    """Less urgent requests keep their blocks if those would not suffice."""
    rig = make_rig(num_blocks=13)
    rig.submit(make_submission(range(20, 50), request_id="big", max_tokens=10))
    rig.submit(make_submission([5, 6, 7], request_id="small", priority=1, max_tokens=5))
    rig.step()
    rig.submit(make_submission(range(50, 75), request_id="urgent", max_tokens=5))
    assert not rig.scheduler.stats.preemptions
    rig.run()
    assert all(sink.events[-1].finish_reason is FinishReason.LENGTH for sink in rig.sinks.values())


@pytest.mark.parametrize(("length", "preempted"), [(30, 0), (26, 3), (18, 1)])
def test_blocks_that_a_more_urgent_request_shares_do_not_become_free(length: int, preempted: int) -> None:
    """As many requests leave at once as certainly make room, or none."""
    rig = make_rig(make_shapes(max_num_seqs=8, buckets=(1, 8)), num_blocks=13)
    prefix = list(range(20, 36))
    for number in range(4):
        name = f"r{number}"
        prompt = [*prefix, 90 + number]
        rig.submit(make_submission(prompt, request_id=name, priority=min(number, 1), max_tokens=30))
    while rig.engine.num_running < 4 or rig.scheduler.prefill_backlog:
        rig.step()
    assert rig.scheduler.kv.groups[0].pool.num_free == 4
    rig.submit(make_submission(range(50, 50 + length), request_id="urgent", priority=0, max_tokens=2))
    assert rig.scheduler.stats.preemptions["priority"] == preempted
    urgent = rig.engine.find("urgent")
    assert urgent is not None
    assert (urgent.slot is None) == (preempted == 0)


def test_free_blocks_of_one_kv_group_do_not_help_another() -> None:
    """A preemption that frees only window blocks does not happen when full-attention blocks are short."""
    rig = make_rig(
        groups=(FULL, KvGroup(GroupKind.PAGED_WINDOW, 4)), num_blocks=(17, 101), prefix_caching=False
    )
    rig.submit(make_submission(range(5, 45), request_id="first", max_tokens=8))
    for _ in range(12):
        rig.step()
    rig.submit(make_submission([50, 51, 52], request_id="less urgent", priority=5, max_tokens=6))
    rig.step()
    rig.step()
    rig.submit(make_submission(range(6, 46), request_id="urgent", priority=2, max_tokens=8))
    assert not rig.scheduler.stats.preemptions
    rig.run()
    assert not rig.scheduler.stats.preemptions
    assert rig.sinks["urgent"].tokens == expected_tokens(range(6, 46), 8)


def test_an_aged_request_that_is_preempted_does_not_loop() -> None:
    """The more urgent request is placed first although the preempted one is next by age; both finish."""
    rig = make_rig(ONE_SLOT, order=PriorityFairOrder(30.0))
    old = rig.submit(make_submission(request_id="old", priority=1, max_tokens=10))
    rig.step()
    rig.now = 70.0
    urgent = rig.submit(make_submission([9, 8], request_id="urgent", max_tokens=3))
    rig.run()
    assert old.tokens == expected_tokens([5, 6, 7], 10)
    assert urgent.tokens == expected_tokens([9, 8], 3)


@pytest.mark.parametrize("length", [7, 30])
def test_an_endless_urgent_load_starves_no_request(length: int) -> None:
    """With ageing, a less urgent request runs in bounded time although urgent requests fill all slots."""
    rig = make_rig(
        make_shapes(max_num_seqs=2, buckets=(1, 2)), order=PriorityFairOrder(1.0), prefix_caching=False
    )
    numbers = itertools.count()

    def submit_urgent() -> None:
        first = 3 + next(numbers) % 40
        rig.submit(make_submission(range(first, first + 7), request_id=f"urgent{first}", max_tokens=4))

    for _ in range(4):
        submit_urgent()
    prompt = [3 + 5 * index % 90 for index in range(length)]
    low = rig.submit(make_submission(prompt, request_id="low", priority=1, max_tokens=4))
    while rig.engine.find("low"):
        while len(rig.engine.waiting) < 4:
            submit_urgent()
        rig.step()
        rig.now += 0.05
        assert rig.now < 5
    assert low.tokens == expected_tokens(prompt, 4)
    assert low.events[0].queue_s > 0.5


def test_ageing_also_orders_the_chunks_of_running_requests() -> None:
    """A running request finishes its prefill although more urgent prompts keep arriving."""
    rig = make_rig(
        make_shapes(max_num_seqs=8, buckets=(1, 8)), num_blocks=200, order=PriorityFairOrder(1.0),
        prefix_caching=False,
    )  # fmt: skip
    numbers = itertools.count()

    def submit_urgent() -> None:
        number = next(numbers)
        prompt = [3 + (number * 7 + number * index) % 90 for index in range(12)]
        rig.submit(make_submission(prompt, request_id=f"urgent{number}", max_tokens=1))

    submit_urgent()
    low = rig.submit(make_submission(range(50, 62), request_id="low", priority=1, max_tokens=1))
    while rig.engine.find("low"):
        while len(rig.engine.waiting) < 3:
            submit_urgent()
        rig.step()
        rig.now += 0.05
        assert rig.scheduler.has_free_slot
        assert rig.now < 5
    assert low.tokens == expected_tokens(range(50, 62), 1)


@pytest.mark.parametrize("lost", [False, True])
def test_computing_again_is_charged_to_nobody(lost: bool) -> None:
    """A preemption or a lost worker costs the tenant no share: prompt and output count once."""
    rig = make_rig(ONE_SLOT)
    rig.submit(make_submission(request_id="a", tenant="a", max_tokens=10, priority=1))
    for _ in range(5):
        rig.step()
    if lost:
        rig.replace_replica()
    else:
        rig.submit(make_submission([9, 8], request_id="urgent", tenant="b", max_tokens=2))
    rig.run()
    assert rig.engine.waiting.tenants["a"] == 3 + 8  # two of ten tokens come with chunks
