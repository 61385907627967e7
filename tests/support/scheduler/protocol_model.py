"""The worker's end of Execute streams: its own code runs plans on a simulated device, step by step.

A worker keeps its memory when a stream breaks. The step that it runs at that moment still ends, and writes;
then it frees its slots, and only then do the plans of the next stream run.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from structlog.testing import capture_logs

from protos.steps import GroupKind, StepPlan, StepResult, slots_of, without_slots
from scheduler_svc.kv.cache import KvCache
from scheduler_svc.kv.sequence import HashChain, seed_key
from scheduler_svc.requests.request import Event
from scheduler_svc.requests.sampling import FinishReason
from tests.support.lockstep import Lockstep
from tests.support.scheduler.factories import ListSink, expected_tokens
from tests.support.scheduler.simulated_device import SimulatedDevice
from worker_svc.api.plan_runner import PlanRunner
from worker_svc.pending_step import PendingStep


class Stream:
    """One Execute stream: what is under way, and what the worker has read."""

    def __init__(self) -> None:
        self.plans: deque[StepPlan] = deque()
        """Plans that were sent and not read."""
        self.results: deque[StepResult] = deque()
        """Results that were sent and not read."""
        self.ended = False
        self._interrupting = -1

    def read(self) -> StepPlan:
        """Reads the next plan at the worker's end."""
        plan = self.plans.popleft()
        if plan.interrupts:
            self._interrupting = plan.step
        return plan

    def is_interrupted(self, step: int) -> bool:
        """See `worker_svc.api.plan_runner.Arrivals`."""
        return self.ended or self._interrupting > step


class ModelWorker:
    """A worker's process: a device, one stream at a time, and the threads that run the worker's own code."""

    def __init__(self, device: SimulatedDevice, *, runs_ahead: bool) -> None:
        """Starts without a stream."""
        self.device = device
        self.stream: Stream | None = None
        self._runs_ahead = runs_ahead
        self._runner: PlanRunner
        # What the thread does after the running plan: plans with their streams, and None to free all slots.
        self._tasks: deque[tuple[Stream, PlanRunner, StepPlan] | None] = deque()
        self._running: Lockstep | None = None
        # What waits for the device.
        self._deferred: deque[Callable[[], object]] = deque()
        self._fails = False
        self._fault: AssertionError | None = None

    def open(self) -> Stream:
        """Accepts a stream."""
        assert self.stream is None
        stream = self.stream = Stream()
        self._runner = PlanRunner(
            self.launch,
            stream.is_interrupted,
            self,
            hand_over=lambda _, result: stream.results.append(result),
        )
        return stream

    def break_stream(self, *, arrived: int, running: bool) -> None:
        """Ends the stream once some plans have arrived; a running step still ends, but its result is lost."""
        assert self.stream is not None
        for _ in range(arrived):
            self.read()
        if self._running is None and running:
            self._begin()
        self.stream.ended = True
        if self._running is not None and not running:
            self._running.drop()
            self._running = None
        self._tasks.append(None)
        self.stream = None

    def die(self) -> None:
        """Ends the process."""
        if self._running is not None:
            self._running.drop()

    def read(self) -> None:
        """Reads one plan, if one has arrived."""
        if self.stream is not None and self.stream.plans:
            self._tasks.append((self.stream, self._runner, self.stream.read()))

    def run(self, *, fails: bool = False) -> None:
        """Runs one step, or frees the slots of a stream that is gone, or reads what has run."""
        if self._running is None:
            self._begin()
        if self._running is None:
            with capture_logs():
                self.settle()
            return
        self._fails = fails and self.stream is not None
        with capture_logs():  # a failed step is logged with its traceback
            self._resume()

    def launch(self, plan: StepPlan) -> PendingStep:
        """See `worker_svc.api.plan_runner.Launcher`; waits for its turn."""
        assert self._running is not None
        self._running.pause()
        try:
            result = self.device.run(plan)
        except AssertionError as fault:
            self._fault = fault
            raise
        refused = [output for output in result.outputs if output.error is not None]
        outputs = [output for output in result.outputs if output.error is None]
        work = plan.work if result.num_steps else None
        if outputs:
            work = without_slots(plan.work, set(slots_of(plan.work)) - {one.slot for one in outputs})
        ahead = self._runs_ahead and work is not None and not result.outputs
        if self._fails and not ahead:
            raise RuntimeError("the step failed")
        if outputs or not (result.token_ids or ahead):
            return PendingStep(work, refused, outputs)
        read = partial(_read, result.token_ids, self._fails and ahead)
        return PendingStep(work, refused, read_tokens=read, runs_ahead=ahead)

    def progressed(self) -> None:
        """See `worker_svc.api.plan_runner.Thread`."""

    def defer(self, function: Callable[[], object]) -> None:
        """See `worker_svc.api.plan_runner.Thread`."""
        self._deferred.append(function)

    def settle(self) -> None:
        """See `worker_svc.api.plan_runner.Thread`."""
        while self._deferred:
            self._deferred.popleft()()

    def _begin(self) -> None:
        """Takes the thread's next task; a plan then waits in front of its first step."""
        while self._running is None and self._tasks:
            task = self._tasks.popleft()
            if task is None:
                self.device.slots.clear()
                self.device.dead.clear()
                return
            stream, runner, plan = task
            if not stream.ended:
                self._running = Lockstep(partial(runner.run, plan))
                self._resume()

    def _resume(self) -> None:
        assert self._running is not None
        self._running.resume()
        if self._fault is not None:
            raise self._fault
        if self._running.done:
            self._running = None


def _read(token_ids: Sequence[int], fails: bool) -> Sequence[int]:
    if fails:
        raise RuntimeError("the step failed")
    return token_ids


class Client:
    """A client: its request, what it has received, and the events that are under way to it."""

    def __init__(
        self, name: str, prompt: list[int], max_tokens: int, n: int, salt: str, stop_at: int | None, *,
        may_fail: bool = False,
    ) -> None:  # fmt: skip
        """Makes a client whose first sequence ends at a stop token in place `stop_at`, if there is one.

        `may_fail` says whether workers may refuse its request.
        """
        self.name = name
        self.may_fail = may_fail
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.n = n
        self.salt = salt
        self.attempts = 0
        self.generated = [expected_tokens(prompt, max_tokens, sequence) for sequence in range(n)]
        """The tokens of each sequence if nothing stops it."""
        self.stop = None if stop_at is None else self.generated[0][min(stop_at, max_tokens - 1)]
        self.wanted = [
            tokens[: tokens.index(self.stop) + 1] if self.stop in tokens else tokens
            for tokens in self.generated
        ]
        self.aborted = self.failed = False
        self.received: list[list[int]] = [[] for _ in range(n)]
        self.ended: set[int] = set()
        self.losses = [0] * n
        self.sink = ListSink()

    @property
    def wire_id(self) -> str:
        """The id of the request; each attempt has a new one."""
        return f"{self.name}.{self.attempts}"

    @property
    def complete(self) -> bool:
        """Whether every sequence has ended."""
        return len(self.ended) == self.n

    def read(self, count: int | None = None) -> None:
        """Receives events that are under way; all of them, or the first `count`."""
        events = self.sink.events[:count]
        del self.sink.events[: len(events)]
        for event in events:
            self._take(event)

    def _take(self, event: Event) -> None:
        if event.error is not None:
            assert self.may_fail, event.error
            self.failed = True
            self.ended.update(range(self.n))
            return
        if self.failed:
            assert event.finish_reason is FinishReason.ABORT, "an error ends all sequences"
            return
        mine, wanted = self.received[event.sequence], self.wanted[event.sequence]
        assert event.sequence not in self.ended, "nothing follows the last event"
        mine.extend(event.token_ids)
        assert mine == wanted[: len(mine)], "no token is lost, doubled or changed"
        if event.worker_losses is not None:
            self.losses[event.sequence] = event.worker_losses
        if event.finish_reason is not None:
            assert mine == wanted or (self.aborted and event.finish_reason is FinishReason.ABORT)
            self.ended.add(event.sequence)


class KnownPrefixes:
    """What the blocks of each indexed prefix must hold."""

    def __init__(self, hash_block_size: int) -> None:
        self._size = hash_block_size
        self._contexts: dict[bytes, list[int]] = {}

    def add(self, client: Client) -> None:
        """Adds the prefixes of a client's sequences."""
        for generated in client.generated:
            tokens = [*client.prompt, *generated]
            chain = HashChain(seed_key(model="m", salt=client.salt), self._size)
            contexts: list[int] = []
            for token in tokens:
                contexts.append(hash((contexts[-1] if contexts else None, token)))
            for index, key in enumerate(chain.extend(tokens, len(tokens) // self._size)):
                self._contexts[key] = contexts[: (index + 1) * self._size]

    def faults(self, kv: KvCache, device: SimulatedDevice) -> Iterator[str]:
        """Yields each indexed block or kept window that holds something else in a device's memory."""
        for group_id, (manager, group) in enumerate(zip(kv.groups, device.groups, strict=True)):
            for block in manager.pool._blocks:
                held = device.memory.get((group_id, block.block_id), [])
                for key in block.keys:
                    contexts = self._contexts[key]
                    if group.kind is GroupKind.IN_PLACE_WINDOW:
                        wanted, found = contexts[-group.window :], held
                    else:
                        start = (len(contexts) - 1) // device.shapes.block_size * device.shapes.block_size
                        wanted = contexts[start:]
                        found = held[: len(wanted)]
                    if found != wanted:
                        yield f"block {block.block_id} of group {group_id} does not hold its prefix"
