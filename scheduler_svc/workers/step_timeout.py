"""Time limits of steps, beyond which a worker counts as hung, and their timer."""

import asyncio
import math
from collections import defaultdict, deque
from collections.abc import Callable, Hashable

from protos.steps import Decode, Pool, Prefill, StepPlan, Work, slots_of

SHORTEST_TIMEOUT_S = 5.0
"""Shortest limit: a process may stand still for as long, for example while its machine swaps."""

TIMES_USUAL = 20
"""Limit of a step in usual times."""

# A first step may include the compilation of its graph, and a second step its capture.
_KNOWN_AFTER = 4

# Results whose median is the usual time.
_REMEMBERED = 9

# Beyond this number of kinds, all are learned again.
_MOST_KINDS = 4096

# A timer as late as this shows that this process itself stood still.
_STOOD_STILL_S = 1.0


class UsualTime:
    """The usual time of a kind of step."""

    def __init__(self, longest_s: float, first_s: float, graph: list["UsualTime"], context: int) -> None:
        """Knows nothing yet; `graph` holds the kinds of the same graph with a known time."""
        self._longest_s, self._first_s = longest_s, first_s
        self._graph = graph
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self.context = context
        """The binary logarithm of the tokens of context."""
        self.usual_s = math.inf
        """Seconds of such a step; infinite while unknown."""

    @property
    def timeout_s(self) -> float:
        """Time limit of the next step of this kind, seconds."""
        usual_s = self.usual_s
        if usual_s == math.inf:
            if self._first_s or not self._graph:
                return max(self._longest_s, self._first_s)
            # Time grows at most in proportion to context.
            beyond = self.context - max(kind.context for kind in self._graph)
            usual_s = max(kind.usual_s for kind in self._graph) * 2 ** max(0, beyond)
        return min(self._longest_s, max(SHORTEST_TIMEOUT_S, TIMES_USUAL * usual_s))

    def observe(self, seconds: float) -> None:
        """Notes the time of a step."""
        known = self._seconds
        known.append(seconds)
        if len(known) < _KNOWN_AFTER:
            return
        if self.usual_s == math.inf:
            self._graph.append(self)
        self.usual_s = sorted(known)[len(known) // 2]


class StepTimeouts:
    """Learns the usual times of the steps of a worker.

    Steps of a kind run the same graph, over about the same context (within a factor of two), with the same
    sampling parameters. Until the usual time of a kind is known, the time of the slowest known kind of its
    graph counts. The first steps of a graph get the longest time, because a device may compile then.
    """

    def __init__(self, longest_s: float, first_s: float = 0.0) -> None:
        """Knows nothing yet; no step may take longer than `longest_s`, seconds.

        If steps make their graphs, or kernels for parameters, a step of an unknown kind may take `first_s`.
        """
        self._longest_s = longest_s
        self._first_s = first_s
        self._usual: dict[Hashable, UsualTime] = {}
        self._graphs: defaultdict[Hashable, list[UsualTime]] = defaultdict(list)
        # The sampling parameters set in each slot: bit n for field n of the message.
        self._parameters: dict[int, int] = {}

    def of(self, plan: StepPlan) -> UsualTime:
        """Returns the usual time of steps like this plan's. Must see every plan, for its admissions."""
        for new in plan.admit:
            self._parameters[new.slot] = sum(1 << field.number for field, _ in new.sampling.ListFields())
        parameters = 0
        for slot in slots_of(plan.work):
            parameters |= self._parameters.get(slot, 0)
        graph, context = _graph_of(plan.work), plan.context_tokens.bit_length()
        kind = graph, context, parameters, bool(plan.copies)
        usual = self._usual.get(kind)
        if usual is None:
            if len(self._usual) == _MOST_KINDS:
                self._usual.clear()
                self._graphs.clear()
            usual = self._usual[kind] = UsualTime(
                self._longest_s, self._first_s, self._graphs[graph], context
            )
        return usual


def _graph_of(work: Work | None) -> Hashable:
    match work:
        case Prefill(sample=sample, bucket=bucket):
            return "prefill", bucket, sample
        case Decode(bucket=bucket):
            return "decode", bucket
        case Pool(shape=shape):
            return "pool", shape
        case None:
            return None


class Deadline:
    """Calls a function when an answer is overdue.

    Setting a deadline is cheap: a timer moves only when it fires, to the present deadline. Time in which this
    process itself stood still does not count, because answers may have arrived meanwhile.
    """

    def __init__(self, overdue: Callable[[], None]) -> None:
        """Waits for nothing yet."""
        self._overdue = overdue
        self._loop = asyncio.get_running_loop()
        # A timer due at once has no `when` on uvloop, so its time is kept here.
        self._timer: asyncio.Handle | None = None
        self._timer_s = 0.0
        self.timeout_s = 0.0
        """Time limit of the latest answer, seconds."""
        self._set_s = 0.0
        self._end_s = math.inf

    def extend(self, timeout_s: float) -> None:
        """Extends the limit of the expected answer to at least `timeout_s` seconds."""
        if timeout_s > self.timeout_s and self._end_s != math.inf:
            self.timeout_s, self._end_s = timeout_s, self._set_s + timeout_s

    def set(self, timeout_s: float) -> None:
        """Expects an answer within `timeout_s` seconds from now."""
        self.timeout_s, self._set_s = timeout_s, self._loop.time()
        self._end_s = self._set_s + timeout_s
        if self._timer is None or self._timer_s > self._end_s:
            self._move_timer()

    def answered(self) -> float:
        """Expects no answer any more; returns the seconds since :meth:`set`."""
        self._end_s = math.inf
        return self._loop.time() - self._set_s

    def close(self) -> None:
        """Removes the timer."""
        self._end_s = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _move_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_s = self._loop.call_at(self._end_s, self._fire), self._end_s

    def _fire(self) -> None:
        now, due = self._loop.time(), self._timer_s
        self._timer = None
        if self._end_s == math.inf:
            return
        if now - due > _STOOD_STILL_S:
            self._end_s = now + self.timeout_s
        if now < self._end_s:
            self._move_timer()
            return
        self._overdue()
