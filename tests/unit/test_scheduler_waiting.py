"""The waiting queue: priority, then arrival; removal from anywhere."""

from scheduler_svc.waiting import WaitingQueue
from tests.scheduler_factories import make_request


def test_lower_priority_numbers_come_first_then_arrival() -> None:
    """Two classes of urgency, each in order of arrival."""
    queue = WaitingQueue()
    for request in (late := make_request(priority=1), first := make_request(), second := make_request()):
        queue.add(request)
    order = []
    while (head := queue.peek()) is not None:
        queue.remove(head)
        order.append(head)
    assert order == [first, second, late]


def test_a_request_that_comes_back_keeps_its_place() -> None:
    """A preempted request runs before everything that arrived after it, also if it left the queue more than once."""
    queue = WaitingQueue()
    old = make_request()
    new = make_request()
    queue.add(old)
    queue.add(new)
    for _ in range(3):
        assert queue.peek() is old
        assert queue.remove(old)
        assert queue.peek() is new
        queue.add(old)
    assert queue.peek() is old
    assert len(queue) == 2


def test_removal_of_a_stranger_is_no_error() -> None:
    """False, and the counts stay."""
    queue = WaitingQueue()
    queue.add(make_request([1, 2, 3]))
    assert not queue.remove(make_request())
    assert (len(queue), queue.num_tokens) == (1, 3)


def test_tokens_are_counted_in_and_out() -> None:
    """The sum that admission bounds is exact."""
    queue = WaitingQueue()
    one, two = make_request([1] * 5), make_request([1] * 7)
    queue.add(one)
    queue.add(two)
    assert queue.num_tokens == 12
    queue.remove(one)
    assert queue.num_tokens == 7
    assert queue.drain() == [two]
    assert (len(queue), queue.num_tokens, queue.peek()) == (0, 0, None)


def test_removed_requests_do_not_pile_up_behind_a_head_that_stays() -> None:
    """Ten thousand come and go while one waits; the heap stays small."""
    queue = WaitingQueue()
    head = make_request(priority=-1)
    queue.add(head)
    for _ in range(10_000):
        request = make_request()
        queue.add(request)
        queue.remove(request)
    assert len(queue._heap) < 200
    assert queue.peek() is head
