"""Runs a simulation: requests arrive, virtual workers run, and time jumps from event to event."""

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

from protos.errors import ConfigurationRefused, Internal, Overloaded, TriptychError
from protos.service.logs import get_logger
from protos.steps import GroupKind
from protos.triptych.v1 import common_pb2
from scheduler_svc.engine.placement import AttachedReplica
from scheduler_svc.requests.admission import Submission
from scheduler_svc.requests.sampling import Sampling
from scheduler_svc.settings import Settings
from scheduler_svc.shapes.batch_histogram import BatchHistogram
from scheduler_svc.shapes.shape_config import DeviceLimits, KvGroup
from scheduler_svc.simulation.measures import Measures, Tally
from scheduler_svc.simulation.requests import VOCAB_SIZE, PromptMaker, SimulatedRequest, split_turns
from scheduler_svc.simulation.step_times import StepTimes
from scheduler_svc.simulation.worker import VirtualWorker
from scheduler_svc.workers.descriptions import WorkerDescription
from scheduler_svc.workers.replicas import GeneratingReplicas, make_engine

_MODEL: Final = "simulated"
_SAMPLES: Final = 2000
"""Looks at the KV memory, spread over the trace."""


def simulate(
    requests: Iterable[SimulatedRequest], settings: Settings, times: StepTimes | Sequence[StepTimes], *,
    replicas: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Runs requests through the scheduler that the settings describe.

    Args:
        requests: in the order of their arrival, those of a session in their own order.
        settings: the scheduler's settings.
        times: the workers' step times and sizes, or those of each worker.
        replicas: number of workers, if `times` does not say.

    Returns:
        The figures of `triptych simulate --json` (seconds, shares from 0 to 1 and counts), and the curves of
        `--svg`.

    Raises:
        ConfigurationRefused: the settings contradict each other, or a request can never be served.
        Internal: requests were left over, which is a fault of the scheduler.
    """
    each = [times] * replicas if isinstance(times, StepTimes) else times
    return Simulation(list(requests), settings, each).run()


class Simulation:
    """The engine, the virtual workers and their clock."""

    def __init__(
        self, requests: list[SimulatedRequest], settings: Settings, times: Sequence[StepTimes]
    ) -> None:
        """Attaches the workers, each with its times; for the arguments see :func:`simulate`."""
        self.now = 0.0
        clock = lambda: self.now  # noqa: E731
        self._requests = requests
        self._prompts = PromptMaker()
        self._measures = Measures(clock, self._ended)
        self.engine = make_engine(settings, clock)
        self.workers: list[VirtualWorker] = []
        """By replica."""
        self._woken: set[int] = set()
        # Step ends by time, and the arrivals of later turns.
        self._ends: list[tuple[float, int]] = []
        self._turns: list[tuple[float, int, SimulatedRequest]] = []
        self._sessions: defaultdict[str, deque[SimulatedRequest]] = defaultdict(deque)
        self._session_of: dict[str, str] = {}
        self._numbers = itertools.count()
        self._sampling: dict[int, Sampling] = {}
        # Sums over the looks at the KV memory, tokens.
        self._uncomputed = self._allocated = 0
        self._look_s = self._look_every_s = 0.0
        self._block_size = 1
        self._attach(settings, times)

    def _attach(self, settings: Settings, times: Sequence[StepTimes]) -> None:
        lengths = [one.prompt_tokens + one.output_tokens for one in self._requests]
        longest = max(lengths, default=1)
        histogram = BatchHistogram(None, None, lambda: self.now, get_logger())
        factory = GeneratingReplicas(settings, self.engine, histogram, lambda: self.now)
        for index, each in enumerate(times):
            description = _description(each, max(longest, settings.max_model_len or 2))
            setup = factory.set_up(f"replica-{index}", description)
            block_size = setup.request.block_size
            self._block_size = block_size
            # More blocks than all requests together take would only cost time.
            most = sum(length // block_size + 2 for length in lengths)
            blocks = settings.num_blocks or min(max(each.kv_tokens, longest) // block_size, most) + 2
            worker = VirtualWorker(each, lambda: self.now, self.engine.dispatch)
            connect = partial(AttachedReplica, wake=self._waker(index, worker))
            worker.scheduler = setup.attach(
                description, setup.make_memory(description, (blocks,)), _MODEL, connect
            )
            self.workers.append(worker)

    def _waker(self, index: int, worker: VirtualWorker) -> Callable[[], None]:
        def wake() -> None:
            self._woken.add(index)
            if self.workers:
                worker.wake()

        return wake

    # ---- time ----

    def run(self) -> dict[str, Any]:
        """Plays the trace to its end; returns the figures."""
        first, later = split_turns(self._requests)
        for turn in later:
            self._sessions[turn.session].append(turn)
        arrivals = iter(first)
        arrival = next(arrivals, None)
        start_s = first[0].arrival_s if first else 0.0
        self._look_every_s = max((first[-1].arrival_s - start_s) / _SAMPLES, 1e-3) if first else 0.0
        while True:
            arrival_s = arrival.arrival_s if arrival is not None else float("inf")
            turn_s = self._turns[0][0] if self._turns else float("inf")
            end_s = self._ends[0][0] if self._ends else float("inf")
            if arrival is not None and arrival_s <= min(turn_s, end_s):
                self.now = max(self.now, arrival_s)
                self._submit(arrival, self.now)
                arrival = next(arrivals, None)
            elif self._turns and turn_s <= end_s:
                self.now, _, request = heapq.heappop(self._turns)
                self._submit(request, self.now)
            elif self._ends:
                self.now, index = heapq.heappop(self._ends)
                if self.now >= self._look_s:
                    self._look()
                self._woken.discard(index)
                self.workers[index].finish()
                self._schedule(index)
            else:
                break
            while self._woken:
                index = self._woken.pop()
                if self.workers[index].ends_s is None:
                    self.workers[index].start()
                    self._schedule(index)
        if left := self.engine.num_running + self.engine.num_waiting:
            raise Internal(f"the scheduler stopped with {left} requests left at {self.now:.3f} s")
        if self._measures.failures:
            raise Internal(f"{len(self._measures.failures)} requests failed: {self._measures.failures[0]}")
        return self._figures(start_s)

    def _schedule(self, index: int) -> None:
        ends_s = self.workers[index].ends_s
        if ends_s is not None:
            heapq.heappush(self._ends, (ends_s, index))

    def _submit(self, request: SimulatedRequest, arrival_s: float) -> None:
        request_id = f"request-{next(self._numbers)}"
        if request.session:
            self._session_of[request_id] = request.session
        sampling = self._sampling.get(request.output_tokens)
        if sampling is None:
            params = common_pb2.SamplingParams(max_tokens=request.output_tokens, ignore_eos=True)
            sampling = self._sampling[request.output_tokens] = Sampling(params)
        submission = Submission(
            request_id,
            self._prompts.prompt(request),
            sampling,
            priority=request.priority,
            tenant=request.tenant,
        )
        self._measures.arrived(request_id, request.tenant, arrival_s)
        try:
            self.engine.submit(submission, self._measures)
        except Overloaded:
            self._measures.rejected(request_id)
        except TriptychError as error:
            raise ConfigurationRefused(f"the request that arrives at {arrival_s:g} s: {error}") from error
        else:
            self._measures.accepted(request_id, self.engine.find(request_id))

    def _ended(self, request_id: str) -> None:
        session = self._session_of.pop(request_id, "")
        if session and (turns := self._sessions[session]):
            turn = turns.popleft()
            heapq.heappush(self._turns, (self.now + turn.arrival_s, next(self._numbers), turn))

    # ---- figures ----

    def _look(self) -> None:
        """Adds up allocated KV memory, and the blocks in it that hold no computed token yet.

        The free end of a sequence's last block is not counted: nothing else could use it.
        """
        self._look_s = self.now + self._look_every_s
        for kv in self.engine.caches().values():
            used = sum(group.pool.num_blocks - group.pool.num_free for group in kv.groups)
            self._allocated += used * kv.block_size
        for request in self.engine.live():
            for table in request.kv.tables:
                begun = -(-request.kv.num_computed // self._block_size)
                self._uncomputed += max(0, len(table.blocks) - begun) * self._block_size

    def _figures(self, start_s: float) -> dict[str, Any]:
        measures, workers = self._measures, self.workers
        span_s = measures.ended_s - start_s
        total = Tally()
        for tally in measures.tenants.values():
            total.add(tally)
        computed, padded = (sum(getattr(one, name) for one in workers) for name in ("computed", "padded"))
        names = sorted(measures.tenants) if len(measures.tenants) > 1 else []
        return {
            **total.figures(span_s),
            "span_s": span_s,
            "requests_by_replica": [
                measures.requests_by_replica[f"replica-{index}"] for index in range(len(workers))
            ],
            "kv_uncomputed_share": self._uncomputed / self._allocated if self._allocated else 0.0,
            "utilization": sum(one.busy_s for one in workers) / (span_s * len(workers)) if span_s else 0.0,
            "padding_share": padded / (computed + padded) if computed else 0.0,
            "curves": {None: total.curves(), **{name: measures.tenants[name].curves() for name in names}},
            "tenants": {name: tally.figures(span_s) for name, tally in sorted(measures.tenants.items())},
        }


def _description(times: StepTimes, max_context: int) -> WorkerDescription:
    """Describes a worker that runs any model of full attention with these step times."""
    unlimited = 1 << 30
    model = common_pb2.ModelInfo(source=_MODEL, vocab_size=VOCAB_SIZE, max_model_len=max_context)
    return WorkerDescription(
        model=model, device=_MODEL, limits=DeviceLimits(max_context, 1, unlimited, unlimited),
        groups=(KvGroup(GroupKind.FULL),), default_max_num_seqs=times.max_num_seqs,
        default_chunk=times.max_num_batched_tokens, default_block_size=times.block_size, prefill_buckets=True,
        max_lease_steps=unlimited, packs_texts=False, max_logprobs=0,
        sampling_fields=frozenset(), lora=None, copies_blocks=True, chunk_starts=times.chunk_starts,
    )  # fmt: skip
