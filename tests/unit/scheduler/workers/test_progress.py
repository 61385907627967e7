"""When a replica that computes nothing is told to start over, and when it is lost."""

from scheduler_svc.workers.progress import LONGEST_S, MOST_IN_A_ROW, ProgressWatch, Stall


class Watched:
    """A watch with a clock that the test turns."""

    def __init__(self) -> None:
        self.now = 0.0
        self.changes: list[Stall | None] = []
        self.watch = ProgressWatch(self.changes.append, lambda: self.now)

    def idle(self, times: int, stall: Stall = Stall.EMPTY, *, each_s: float = 0.0) -> list[bool]:
        starts = []
        for _ in range(times):
            starts.append(self.watch.idled(stall))
            self.now += each_s
        return starts


def test_a_stall_is_found_within_a_second() -> None:
    """Few results suffice if they take long."""
    watched = Watched()
    while not watched.idle(1, each_s=0.15)[0]:
        assert watched.now < 1.0
    assert watched.now >= LONGEST_S


def test_results_around_a_slow_step_are_no_stall() -> None:
    """A plan that only releases slots gives one, before and after a chunk of many seconds."""
    watched = Watched()
    assert not any(watched.idle(2))
    watched.now += 30.0
    assert not any(watched.idle(1))


def test_plans_that_were_sent_before_do_not_count() -> None:
    """On a pipeline, one failed chunk makes the worker skip all chunks after it."""
    watched = Watched()
    assert not watched.watch.idled(Stall.EMPTY, in_flight=40)
    watched.now += 10.0
    assert not any(watched.idle(40, each_s=1.0))
    watched.watch.computed()
    assert watched.idle(MOST_IN_A_ROW)[-1]


def test_many_wakes_are_no_stall() -> None:
    """Each makes the step loop look for a plan, and none says anything about the replica."""
    watched = Watched()
    assert not any(watched.idle(10 * MOST_IN_A_ROW, Stall.UNPLANNED))
    watched.now += LONGEST_S
    assert watched.idle(1, Stall.UNPLANNED) == [True]


def test_a_computed_step_ends_a_stall() -> None:
    """The next one is a first one again."""
    watched = Watched()
    watched.idle(MOST_IN_A_ROW)
    watched.watch.computed()
    watched.watch.computed()
    assert watched.idle(MOST_IN_A_ROW)[-1]
    assert watched.changes == [Stall.EMPTY, None, Stall.EMPTY]
