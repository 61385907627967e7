"""Ranks of a replica within one process, without a model: they check what a model's collectives rely on.

A rank that launches another step than the other ranks of its stage, or launches it at another time, fails
there, and so does a stage that does not get what the stage before has computed.
"""

import queue
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NoReturn, cast

from protos.steps import Decode, SlotOutput, StepPlan, StepResult, Work, slots_of, without_slots
from worker_svc.execution.lockstep import Follower, PlanRefused
from worker_svc.pending_step import PendingStep, as_outputs
from worker_svc.ranks.group import Channel
from worker_svc.ranks.layout import RankLayout

PATIENCE_S: Final = 20.0
"""How long ranks wait for one another. Only a rank that never comes makes them wait so long."""
REFUSED_SLOT: Final = 99
"""A plan that releases this slot contradicts the state of all ranks."""

_Queue = queue.SimpleQueue[bytes | None]


class ApartError(Exception):
    """The ranks have come apart."""


class _End:
    """One member's end of a channel."""

    def __init__(self, queues: dict[int, _Queue], rank: int) -> None:
        self._queues = queues
        self._rank = rank

    def send(self, message: bytes) -> None:
        for rank, each in self._queues.items():
            if rank != self._rank:
                each.put(message)

    def receive(self) -> bytes:
        message = self._queues[self._rank].get()
        if message is None:
            raise RuntimeError("the group has ended")
        return message


class Ranks:
    """The group: its channels, and where collectives meet."""

    def __init__(self, tensor: int, pipeline: int) -> None:
        """Makes the group of a layout."""
        self.layouts = [RankLayout(rank, tensor, pipeline) for rank in range(tensor * pipeline)]
        """Each rank's place."""
        last = self.layouts[-1].peers
        earlier = [layout.rank for layout in self.layouts if not layout.is_last_stage]
        everyone = [layout.rank for layout in self.layouts]
        self._queues: dict[str, dict[int, _Queue]] = {
            name: {rank: queue.SimpleQueue() for rank in ranks}
            for name, ranks in (("plans", everyone), ("choices", last), ("results", [*earlier, last[0]]))
        }
        self._changed = threading.Condition()
        # What each rank brings to a collective, by name and number of the collective.
        self._collectives: defaultdict[tuple[str, int], dict[int, object]] = defaultdict(dict)
        self._counts: Counter[tuple[str, int]] = Counter()
        self._states: dict[int, deque[object]] = {layout.rank: deque() for layout in self.layouts}
        self.broken = ""
        """Why the ranks are apart; empty if they are not."""
        self.logs: list[list[object]] = [[] for _ in self.layouts]
        """What each rank has launched, and resets, in order."""
        self.refusals: dict[int, Exception] = {}
        """By rank, the error that its next configuration ends with."""
        self.gates: dict[int, threading.Event] = {}
        """By rank, what must be set before its configuration ends."""

    def end(self, rank: int, channel: str) -> Channel:
        """Returns a rank's end of a channel."""
        return cast("Channel", _End(self._queues[channel], rank))

    def meet(self, rank: int, name: str, peers: Sequence[int], value: object) -> list[object]:
        """Waits for the same collective of all peers; returns their values."""
        with self._changed:
            number = self._counts[name, rank]
            self._counts[name, rank] += 1
            present = self._collectives[name, number]
            present[rank] = value
            self._changed.notify_all()
            self._wait(lambda: len(present) == len(peers), f"rank {rank} waits alone in {name} {value}")
            return [present[peer] for peer in peers]

    def launch_together(self, rank: int, step: object) -> None:
        """Runs the collectives of a step, which all ranks of the stage must launch."""
        layout = self.layouts[rank]
        if not layout.is_first_stage:
            states = self._states[rank]
            with self._changed:
                self._wait(lambda: bool(states), f"rank {rank} waits for {step}, which no stage computes")
                if (received := states.popleft()) != step:
                    self.fail(f"rank {rank} launches {step} on the states of {received}")
        launched = self.meet(rank, f"stage {layout.stage}", layout.peers, step)
        if any(other != step for other in launched):
            self.fail(f"the ranks of a stage launch {launched}")
        if not layout.is_last_stage:
            with self._changed:
                self._states[rank + layout.tensor].append(step)
                self._changed.notify_all()

    def note(self, rank: int, what: object) -> None:
        """Adds to a rank's log."""
        with self._changed:
            self.logs[rank].append(what)
            self._changed.notify_all()

    def compare(self) -> None:
        """Waits until every rank has done as much as rank 0, and checks that it was the same."""
        with self._changed:
            first, *others = self.logs
            self._wait(lambda: all(len(log) >= len(first) for log in others), "a rank has a step less")
        for rank, log in enumerate(others, start=1):
            assert log == first, f"rank {rank} has launched other steps than rank 0"

    def fail(self, reason: str) -> NoReturn:
        """Notes that the ranks are apart, which ends all waits."""
        with self._changed:
            self.broken = self.broken or reason
            self._changed.notify_all()
        raise ApartError(self.broken)

    def close(self) -> None:
        """Ends the threads that wait for messages."""
        for queues in self._queues.values():
            for each in queues.values():
                each.put(None)

    def _wait(self, ready: Callable[[], bool], otherwise: str) -> None:
        if not self._changed.wait_for(lambda: ready() or bool(self.broken), PATIENCE_S):
            self.fail(otherwise)
        if self.broken:
            raise ApartError(self.broken)


class FakeGroup:
    """`RankGroup` within a process."""

    epoch = "e"
    stage: Mapping[str, Sequence[int]] = MappingProxyType({})

    def __init__(self, ranks: Ranks, rank: int) -> None:
        """Joins `ranks`."""
        self._ranks = ranks
        self.layout = ranks.layouts[rank]
        self.plans = ranks.end(rank, "plans")
        if not self.layout.is_last_stage or self.layout.chooses:
            self.results = ranks.end(rank, "results")

    def exchange(self, value: bytes) -> list[object]:
        """Returns the values of all ranks."""
        everyone = range(self.layout.world_size)
        return self._ranks.meet(self.layout.rank, "exchange", everyone, value)


@dataclass
class _Pending:
    plan: StepPlan
    work: Work
    gone: set[int] = field(default_factory=set)


class FakeSteps:
    """Runs the steps of one rank: notes them, and meets the others. The token of a step is its position.

    Any chunk computes all tokens that its slot has.
    """

    def __init__(self, ranks: Ranks, rank: int, *, runs_ahead: bool = False, forcing: int = 0) -> None:
        """Starts with all slots free.

        `runs_ahead` says whether tokens may be read after the next launch. A slot gets a forced token behind
        one that is a multiple of `forcing`, unless that is 0.
        """
        self._ranks = ranks
        self._layout = ranks.layouts[rank]
        self._runs_ahead = runs_ahead
        self._forcing = forcing
        self._pending: deque[_Pending] = deque()
        # By slot, as this rank knows them.
        self._known: defaultdict[int, int] = defaultdict(lambda: 1)
        self._computed: defaultdict[int, int] = defaultdict(int)

    def launch(self, plan: StepPlan) -> PendingStep:
        """Launches a step."""
        if REFUSED_SLOT in plan.release:
            raise PlanRefused("the plan contradicts earlier plans")
        for slot in plan.release:
            self._release(slot)
        skipped = {slot for slot in slots_of(plan.work) if self._known[slot] > self._computed[slot] + 1}
        work = without_slots(plan.work, skipped) if isinstance(plan.work, Decode) else plan.work
        slots = slots_of(work)
        step = (plan.step, *((slot, self._computed[slot]) for slot in slots))
        self._ranks.note(self._layout.rank, step)
        if work is None:
            return PendingStep()
        self._ranks.launch_together(self._layout.rank, step)
        if not self._layout.is_last_stage:
            self._pending.append(_Pending(plan, work))
            return PendingStep(work)
        given = {slot: self._tokens_behind(slot) for slot in slots}
        self._advance(given)
        if any(len(tokens) > 1 for tokens in given.values()):
            return PendingStep(work, outputs=[SlotOutput(slot, tokens) for slot, tokens in given.items()])
        token_ids = [token for (token,) in given.values()]
        return PendingStep(work, read_tokens=lambda: token_ids, runs_ahead=self._runs_ahead)

    def apply(self, result: StepResult) -> None:
        """Takes the result of the oldest pending step, and no other's."""
        pending = self._pending.popleft()
        outputs = as_outputs(pending.work, result.token_ids) or result.outputs
        given = {output.slot: output.token_ids for output in outputs}
        live = {slot: each for slot, each in given.items() if slot not in pending.gone}
        expected = {slot: self._tokens_behind(slot) for slot in live}
        if (result.step, live) != (pending.plan.step, expected):
            self._ranks.fail(f"{self._layout} takes the result of {result.step} for {pending.plan.step}'s")
        self._advance(live)

    def reset(self) -> None:
        """Frees every slot."""
        self._ranks.note(self._layout.rank, "reset")
        for slot in list(self._known):
            self._release(slot)

    def release(self) -> None:
        """Drops the configuration."""
        if self._pending:
            self._ranks.fail(f"{self._layout} drops its configuration before the results of its steps")
        self._ranks.note(self._layout.rank, "release")
        self._known.clear()
        self._computed.clear()

    def unload(self, adapter_id: int) -> None:
        """Frees an adapter."""
        self._ranks.note(self._layout.rank, f"unload {adapter_id}")

    def _release(self, slot: int) -> None:
        self._known.pop(slot, None)
        self._computed.pop(slot, None)
        for pending in self._pending:
            pending.gone.add(slot)

    def _tokens_behind(self, slot: int) -> tuple[int, ...]:
        token = self._known[slot]
        return (token, token + 1) if self._forcing and token % self._forcing == 0 else (token,)

    def _advance(self, given: Mapping[int, Sequence[int]]) -> None:
        for slot, tokens in given.items():
            self._computed[slot] = self._known[slot]
            self._known[slot] += len(tokens)


class Waiting:
    """The thread that waits for a device; see `ModelThread`."""

    def __init__(self) -> None:
        self._deferred: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def progressed(self) -> None:
        """Has nothing to report to."""

    def defer(self, function: Callable[[], object]) -> None:
        self._deferred.put(function)

    def settle(self) -> None:
        self._deferred.join()

    def close(self) -> None:
        self._deferred.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (function := self._deferred.get()) is not None:
            try:
                function()
            finally:
                self._deferred.task_done()


def follow(follower: Follower) -> None:
    """Runs announcements until there are no more."""
    waiting = Waiting()
    try:
        while (announcement := follower.wait()) is not None:
            if (rest := follower.run(announcement)) is not None:
                waiting.defer(rest)
    except RuntimeError:
        waiting.close()
