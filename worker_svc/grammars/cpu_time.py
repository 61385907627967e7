"""Divides the CPU time of many short calls among the matchers that they went to."""

import itertools
import time
from collections.abc import Sequence
from typing import Final

# A step within this time is free: it is what each token adds to its request's budget.
_FREE_S: Final = 0.001


class BatchClock:
    """Measures one pass over the rows of a step.

    Asking for a thread's CPU time is a system call, which takes as long as looking up a token. So the pass is
    measured as a whole, and each row's part by the wall clock, which costs a twentieth of that.
    """

    def __init__(self) -> None:
        """Starts the clock."""
        self._cpu_s = time.thread_time()
        self.laps = [time.perf_counter()]
        """When the pass started and when each part ended; the caller appends the latter."""

    def shares(self) -> Sequence[float]:
        """Returns the CPU time of each part in seconds; nothing if the pass was short enough to be free.

        A part interrupted by another process gets a larger share. All shares together are the pass's CPU
        time.
        """
        spent_s = time.thread_time() - self._cpu_s
        if spent_s <= _FREE_S:
            return ()
        ends = self.laps
        scale = spent_s / (ends[-1] - ends[0])
        return [(end - start) * scale for start, end in itertools.pairwise(ends)]
