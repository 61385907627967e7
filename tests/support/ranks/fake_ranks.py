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

from protos.steps import Decode, StepPlan, StepResult, Work
from worker_svc.execution.lockstep import PlanRefused
from worker_svc.pending_step import PendingStep
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
    gone: set[int] = field(default_factory=set)


class FakeSteps:
    """Runs the steps of one rank: notes them, and meets the others. The token of a step is its position."""

    def __init__(self, ranks: Ranks, rank: int, *, runs_ahead: bool = False) -> None:
        """Starts with all slots free; `runs_ahead` says whether tokens may be read after the next launch."""
        self._ranks = ranks
        self._layout = ranks.layouts[rank]
        self._runs_ahead = runs_ahead
        self._pending: deque[_Pending] = deque()
        # The position of each decoding slot.
        self._next: dict[int, int] = {}

    def launch(self, plan: StepPlan, *, leased: bool = False) -> PendingStep:
        """Launches a step."""
        if REFUSED_SLOT in plan.release:
            raise PlanRefused("the plan contradicts earlier plans")
        for slot in plan.release:
            self._release(slot)
        work = plan.work
        step = (plan.step, leased, *_places(work))
        self._ranks.note(self._layout.rank, step)
        if work is None:
            return PendingStep(has_work=False)
        for slot, position in _places(work):
            if position != self._next.setdefault(slot, position):
                self._ranks.fail(f"{self._layout} launches {step}, but slot {slot} is at {self._next[slot]}")
        self._ranks.launch_together(self._layout.rank, step)
        if not self._layout.is_last_stage:
            self._pending.append(_Pending(plan))
            return PendingStep()
        self._advance(_places(work))
        tokens = [position for _, position in _places(work)]
        return PendingStep(read_tokens=lambda: tokens, runs_ahead=self._runs_ahead)

    def apply(self, result: StepResult) -> None:
        """Takes the result of the oldest pending step, and no other's."""
        pending = self._pending.popleft()
        places = _places(pending.plan.work)
        if (result.step, list(result.token_ids)) != (pending.plan.step, [at for _, at in places]):
            self._ranks.fail(f"{self._layout} takes the result of {result.step} for {pending.plan.step}'s")
        self._advance([place for place in places if place[0] not in pending.gone])

    def reset(self) -> None:
        """Frees every slot."""
        self._ranks.note(self._layout.rank, "reset")
        for slot in list(self._next):
            self._release(slot)

    def release(self) -> None:
        """Drops the configuration."""
        if self._pending:
            self._ranks.fail(f"{self._layout} drops its configuration before the results of its steps")
        self._ranks.note(self._layout.rank, "release")
        self._next.clear()

    def unload(self, adapter_id: int) -> None:
        """Frees an adapter."""
        self._ranks.note(self._layout.rank, f"unload {adapter_id}")

    def _release(self, slot: int) -> None:
        self._next.pop(slot, None)
        for pending in self._pending:
            pending.gone.add(slot)

    def _advance(self, places: Sequence[tuple[int, int]]) -> None:
        self._next.update({slot: position + 1 for slot, position in places})


def _places(work: Work | None) -> list[tuple[int, int]]:
    """Returns the slots and positions of a decode step."""
    return list(zip(work.slots, work.positions, strict=True)) if isinstance(work, Decode) else []
