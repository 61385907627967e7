"""Execute streams as values: what is under way on a stream, and in which order a worker works.

A worker keeps its memory when a stream breaks. The step that it runs at that moment still ends, and writes;
then it frees its slots, and only then do the plans of the next stream run.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from protos.errors import Internal
from protos.kv_groups import GroupKind
from protos.steps import Decode, StepPlan, StepResult
from scheduler_svc.kv.cache import KvCache
from scheduler_svc.kv.sequence import HashChain, seed_key
from scheduler_svc.requests.request import Event
from scheduler_svc.requests.sampling import FinishReason
from tests.support.plan_order import next_leased
from tests.support.scheduler.factories import ListSink, SimulatedDevice, expected_tokens


class Stream:
    """One Execute stream: messages that were sent and not read."""

    def __init__(self) -> None:
        self.plans: deque[StepPlan] = deque()
        self.results: deque[StepResult] = deque()


class ModelWorker:
    """A worker's process: a device, one stream at a time, and one thread."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.stream: Stream | None = None
        self._read: deque[StepPlan] = deque()
        # The step that runs next, and its index in the lease.
        self._next: StepPlan | None = None
        self._index = 0
        # The number of the last plan on this stream that ran whole.
        self._whole = 0
        # What the thread still has to do for streams that are gone: late steps, and None to free all slots.
        self._late: deque[StepPlan | None] = deque()

    def open(self) -> Stream:
        """Accepts a stream."""
        assert self.stream is None
        self.stream, self._whole = Stream(), 0
        return self.stream

    def break_stream(self, *, arrived: int, running: bool) -> None:
        """Ends the stream.

        Args:
            arrived: how many of the plans that are under way arrive before the end.
            running: whether the next step runs already; it then ends, but its result is lost.
        """
        assert self.stream is not None
        for _ in range(min(arrived, len(self.stream.plans))):
            self.read()
        if running and (step := self._take()) is not None:
            self._late.append(step)
        self._late.append(None)
        self.stream, self._next = None, None
        self._read.clear()

    def read(self) -> None:
        """Reads one plan, if one has arrived."""
        if self.stream is not None and self.stream.plans:
            self._read.append(self.stream.plans.popleft())

    def run(self) -> None:
        """Runs one step, or frees the slots of a stream that is gone."""
        if self._late:
            step = self._late.popleft()
            if step is None:
                self.device.slots.clear()
            else:
                self.device.run(step)
        elif self.stream is not None and (plan := self._take()) is not None:
            self.stream.results.append(self._answer(plan))

    def fail(self) -> None:
        """Runs one step that raises: it has written, and its result is an error."""
        if self.stream is not None and not self._late and (plan := self._take()) is not None:
            self.device.run(plan)
            error = Internal("the step failed")
            self.stream.results.append(StepResult(plan.step, error=error, last=True, lease_index=self._index))
            self._next = None

    def _take(self) -> StepPlan | None:
        if self._next is None and self._read:
            self._next, self._index = self._read.popleft(), 0
            if self._next.continues and self._whole != self._next.step - 1:
                self._next = replace(self._next, work=None)
        return self._next

    def _answer(self, plan: StepPlan) -> StepResult:
        lease = plan.work.lease if isinstance(plan.work, Decode) else 1
        result = self.device.run(plan)
        void = plan.continues and plan.work is None
        ended = self._index + 1 == lease
        if ended and not (result.outputs or void):
            self._whole = plan.step
        last = ended or bool(result.outputs) or any(not newer.continues for newer in self._read)
        result = replace(result, lease_index=self._index, last=last, void=void)
        self._next, self._index = None if last else next_leased(plan), self._index + 1
        return result


class Client:
    """A client: its request, what it has received, and the events that are under way to it."""

    def __init__(
        self, name: str, prompt: list[int], max_tokens: int, n: int, salt: str, stop_at: int | None
    ) -> None:
        """Makes a client whose first sequence ends at a stop token in place `stop_at`, if there is one."""
        self.name = name
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
        self.aborted = False
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
        assert event.error is None, event.error
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
                        start = (len(contexts) - 1) // device.geometry.block_size * device.geometry.block_size
                        wanted = contexts[start:]
                        found = held[: len(wanted)]
                    if found != wanted:
                        yield f"block {block.block_id} of group {group_id} does not hold its prefix"
