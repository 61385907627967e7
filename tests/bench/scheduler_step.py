"""Compares what one step costs Triptych's scheduler and vLLM's: scheduling, and updating with the result.

``python -m tests.bench.scheduler_step [--quick]`` runs both in turn (A B A B ...) with 1, 32, 128, 512 and
1,024 requests in steady decode. Each plan gets the same answer: one token per request. ``ratios`` are ours
divided by vLLM's, by number of requests; each side is its median of schedule + update.

Both have blocks of 128 tokens, prefix caching for prompts and generated tokens, and memory for everything.
Prompts have 128 to 255 tokens, so some requests need a block at each step; no request ends. The garbage
collector is off while the clock runs. Ours hands its events to a real event buffer, as vLLM builds its
outputs. Preparing the model's answer and emptying the buffer do not count. Neither side serializes anything.

The stream phase adds what the tokens of a 128-row step cost on their way to a gateway: from the event buffer
to bytes, and from bytes to 128 requests. Its ratios are against 60 us a side.

The mixed phase passes a queue of requests through 128 slots until all have finished, prefills included, and
reports the scheduling time per generated token.
"""

import asyncio
import contextlib
import gc
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

import structlog

from gateway.scheduler_client.in_flight import InFlightRequests, Outbox, StartupQueue
from protos.errors import Unavailable
from protos.service.backpressure import UnreadLimits
from protos.steps import Decode, GroupKind, Prefill, StepResult
from protos.triptych.v1 import common_pb2, inference_pb2
from scheduler_svc.api.events import ConnectEncoder, EventBuffer
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.placement import AttachedReplica
from scheduler_svc.kv.cache import CacheOptions, KvCache
from scheduler_svc.policy.order import PriorityFairOrder
from scheduler_svc.policy.rules import Turns
from scheduler_svc.replica.scheduler import ReplicaScheduler
from scheduler_svc.requests.admission import ModelLimits, Submission
from scheduler_svc.requests.request import Event
from scheduler_svc.requests.sampling import Sampling
from scheduler_svc.shapes.batch_histogram import BatchHistogram
from scheduler_svc.shapes.buckets import decode_buckets
from scheduler_svc.shapes.shape_config import KvGroup, ShapeConfig
from tests.bench.support.report import parser, report
from tests.support.gateway.clients import EventReader
from tests.support.scheduler import vllm_peer

SIZES: Final = (1, 32, 128, 512, 1024)
BLOCK_SIZE: Final = 128
MAX_MODEL_LEN: Final = 4096
MIXED_SLOTS: Final = 128
STREAM_ROWS: Final = 128
STREAM_LIMIT_US: Final = 60.0


@dataclass(frozen=True, slots=True)
class Step:
    """Time of one step, and the tokens that it generated."""

    schedule_s: float
    update_s: float
    num_tokens: int


class Contender(Protocol):
    """A scheduler with its no-op model."""

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        """Queues a request."""

    def step(self) -> Step:
        """Schedules a step, prepares the no-op answer, and updates with it."""

    @property
    def num_decoding(self) -> int:
        """Number of requests that generate a token with each decode step."""


class VllmScheduler:
    """vLLM's scheduler."""

    def __init__(self, max_num_seqs: int, num_blocks: int) -> None:
        self._peer = vllm_peer.SchedulerPeer(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=8192, block_size=BLOCK_SIZE, num_blocks=num_blocks,
            max_model_len=MAX_MODEL_LEN,
        )  # fmt: skip

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        """Queues a request."""
        self._peer.add(request_id, prompt, max_tokens)

    def step(self) -> Step:
        """Runs one step."""
        scheduler = self._peer.scheduler
        started = time.perf_counter()
        plan = scheduler.schedule()
        scheduled = time.perf_counter()
        result = self._peer.result(plan)
        resumed = time.perf_counter()
        scheduler.update_from_output(plan, result)
        updated = time.perf_counter()
        return Step(scheduled - started, updated - resumed, sum(map(len, result.sampled_token_ids)))

    @property
    def num_decoding(self) -> int:
        """Number of requests that have generated a token and continue."""
        return sum(request.num_output_tokens > 0 for request in self._peer.scheduler.running)


class OurScheduler:
    """Our scheduler: an engine with one replica, and the event buffer of one client's stream."""

    def __init__(self, max_num_seqs: int, num_blocks: int) -> None:
        buckets = decode_buckets("exponential", max_batch=max_num_seqs)
        shapes = ShapeConfig(MAX_MODEL_LEN, max_num_seqs, BLOCK_SIZE, BLOCK_SIZE, buckets)
        self._engine = Engine(
            max_waiting=1 << 20, max_waiting_tokens=1 << 40, clock=time.monotonic, order=PriorityFairOrder()
        )
        kv = KvCache(shapes, [KvGroup(GroupKind.FULL)], [num_blocks], model="bench",
                     options=CacheOptions(cache_generated=True))  # fmt: skip
        histogram = BatchHistogram(None, None, time.monotonic, structlog.get_logger())
        self._scheduler = ReplicaScheduler(
            shapes, kv, self._engine, Turns(1), clock=time.monotonic, depth=1
        )  # fmt: skip
        self._scheduler.stats.observe_batch = histogram.observe
        self._engine.model = ModelLimits(
            MAX_MODEL_LEN, vllm_peer.VOCAB_SIZE, frozenset({"temperature"}), 0, frozenset({2})
        )
        self._engine.attach("replica", AttachedReplica(self._scheduler, lambda: None))
        limits = UnreadLimits(per_reader=1 << 20, total=1 << 22, flags=("", ""))
        self._sink = EventBuffer(limits, lambda: None)
        self._loop = asyncio.new_event_loop()
        self.num_decoding = 0

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        """Queues a request."""
        sampling = Sampling(common_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
        self._engine.submit(Submission(request_id, tuple(prompt), sampling), self._sink)

    def step(self) -> Step:
        """Runs one step as a replica's driver does."""
        started = time.perf_counter()
        self._engine.dispatch()
        plan = self._scheduler.next_plan()
        scheduled = time.perf_counter()
        assert plan is not None
        tokens: tuple[int, ...] = ()
        if isinstance(plan.work, Decode):
            tokens = (7,) * len(plan.work.slots)
        elif isinstance(plan.work, Prefill) and plan.work.sample:
            tokens = (7,)
        result = StepResult(plan.step, token_ids=tokens)
        resumed = time.perf_counter()
        self._scheduler.update(result)
        updated = time.perf_counter()
        self._sink.wake()
        events = self._loop.run_until_complete(self._sink.take())
        num_events = sum(len(event[0]) if isinstance(event, tuple) else 1 for event in events)
        assert num_events == len(tokens), "every token has an event"
        self.num_decoding = len(plan.work.slots) if isinstance(plan.work, Decode) else self.num_decoding
        return Step(scheduled - started, updated - resumed, len(tokens))

    def close(self) -> None:
        """Closes the event loop."""
        self._loop.close()


def prompt_of(index: int, length: int) -> list[int]:
    """Returns a prompt that shares no block with another prompt."""
    return [3 + (index * 7919 + position) % 30_011 for position in range(length)]


@dataclass
class Figures:
    """Times of one contender's steps at one size, microseconds."""

    schedule: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)

    def add(self, step: Step) -> None:
        """Adds a step."""
        self.schedule.append(step.schedule_s * 1e6)
        self.update.append(step.update_s * 1e6)

    @property
    def total(self) -> float:
        """Median of schedule + update, microseconds."""
        return statistics.median(map(sum, zip(self.schedule, self.update, strict=True)))

    def summary(self) -> dict[str, float]:
        """Returns medians, and the mean, which also covers the rarer steps that allocate blocks."""
        return {
            "schedule_us": round(statistics.median(self.schedule), 1),
            "update_us": round(statistics.median(self.update), 1),
            "step_us": round(self.total, 1),
            "mean_step_us": round(statistics.fmean(self.schedule) + statistics.fmean(self.update), 1),
        }


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Turns the garbage collector off, and excludes existing objects from later collections."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def steady(size: int, rounds: int, steps: int) -> tuple[Figures, Figures]:
    """Runs ``steps`` steps of ours, then of vLLM's, ``rounds`` times, with ``size`` decoding requests."""
    num_blocks = 1 + size * (MAX_MODEL_LEN // BLOCK_SIZE)
    ours, theirs = OurScheduler(size, num_blocks), VllmScheduler(size, num_blocks)
    figures = (Figures(), Figures())
    contenders: tuple[Contender, Contender] = (ours, theirs)
    for contender in contenders:
        for index in range(size):
            prompt = prompt_of(index, BLOCK_SIZE + index * BLOCK_SIZE // size)
            contender.add(f"request-{index}", prompt, MAX_MODEL_LEN - len(prompt))
        while contender.num_decoding < size:
            contender.step()
        for _ in range(8):
            contender.step()
    for _ in range(rounds):
        for contender, mine in zip(contenders, figures, strict=True):
            with no_collection():
                for _ in range(steps):
                    step = contender.step()
                    assert step.num_tokens == size, "steady decode"
                    mine.add(step)
    ours.close()
    gc.unfreeze()
    return figures


def mixed(num_requests: int) -> tuple[float, float]:
    """Returns scheduling microseconds per generated token, ours and vLLM's.

    A queue of ``num_requests`` requests passes through 128 slots.
    """
    dice = random.Random(3)
    lengths = [(dice.randrange(128, 1024), dice.randrange(64, 256)) for _ in range(num_requests)]
    wanted = sum(count for _, count in lengths)
    num_blocks = 1 + MIXED_SLOTS * 16
    ours, theirs = OurScheduler(MIXED_SLOTS, num_blocks), VllmScheduler(MIXED_SLOTS, num_blocks)
    spent = []
    for contender in (ours, theirs):
        with no_collection():
            started = time.perf_counter()
            for index, (prompt, count) in enumerate(lengths):
                contender.add(f"request-{index}", prompt_of(index, prompt), count)
            seconds = time.perf_counter() - started
            generated = 0
            while generated < wanted:
                step = contender.step()
                seconds += step.schedule_s + step.update_s
                generated += step.num_tokens
        assert generated == wanted, "every request generates its tokens"
        spent.append(seconds / wanted * 1e6)
    ours.close()
    gc.unfreeze()
    return spent[0], spent[1]


def stream(steps: int) -> tuple[float, float]:
    """Returns the median microseconds in which a step's tokens are encoded and decoded, without gRPC."""
    table = InFlightRequests(Outbox(), StartupQueue(0, 0.0), 60.0)
    encoder, encode_us, decode_us = ConnectEncoder(), [], []

    async def run() -> None:
        group_of_one = [
            inference_pb2.GenerateRequest(request_id=f"request-{row}") for row in range(STREAM_ROWS)
        ]
        groups = [EventReader(table.submit([request])) for request in group_of_one]
        ids = [request.request_id for request in group_of_one]
        for message in encoder.encode([Event(name, (7,), first=True) for name in ids]):
            table.deliver(message)
        for step in range(steps):
            tokens = [(step * 7919 + row) % vllm_peer.VOCAB_SIZE for row in range(STREAM_ROWS)]
            started = time.perf_counter()
            data = [message.SerializeToString() for message in encoder.encode([(ids, tokens)])]
            encoded = time.perf_counter()
            for part in data:
                table.deliver(inference_pb2.ConnectResponse.FromString(part))
            delivered = time.perf_counter()
            encode_us.append((encoded - started) * 1e6)
            decode_us.append((delivered - encoded) * 1e6)
            news = [(await group.take())[-1][1].token_ids[0] for group in groups]
            assert news == tokens, "every request receives its token"
        table.fail_all(Unavailable("the bench ends"))

    with no_collection():
        asyncio.run(run())
    return statistics.median(encode_us), statistics.median(decode_us)


def main() -> None:
    """Runs the bench and prints its line."""
    options = parser(__doc__, "fewer steps")
    quick = options.parse_args().quick
    vllm_peer.prepare()
    rounds, steps = (3, 20) if quick else (6, 64)
    ratios: dict[str, float] = {}
    sizes: dict[str, object] = {}
    for size in SIZES:
        # Short steps run more often, to average out the clock's own cost and cache effects.
        ours, theirs = steady(size, rounds, steps if size > 32 else 4 * steps)
        ratios[str(size)] = ours.total / theirs.total
        sizes[str(size)] = {"ours": ours.summary(), "vllm": theirs.summary()}
        print(
            f"{size:5} running: ours {ours.summary()}\n{'':15}vLLM {theirs.summary()}  ratio {ratios[str(size)]:.3f}"
        )
    ours_us, theirs_us = mixed(256 if quick else 1024)
    print(f"mixed: ours {ours_us:.2f} us, vLLM {theirs_us:.2f} us a token, ratio {ours_us / theirs_us:.3f}")
    phase = {
        "ours_us_per_token": round(ours_us, 2),
        "vllm_us_per_token": round(theirs_us, 2),
        "ratio": round(ours_us / theirs_us, 4),
    }
    encode_us, decode_us = stream(200 if quick else 2000)
    print(f"stream of {STREAM_ROWS} rows: encoded in {encode_us:.1f} us, decoded in {decode_us:.1f} us")
    ratios |= {"encode": encode_us / STREAM_LIMIT_US, "decode": decode_us / STREAM_LIMIT_US}
    to_gateway = {"encode_us": round(encode_us, 1), "decode_us": round(decode_us, 1)}
    report("scheduler_step", {"by_running": sizes, "mixed": phase, "stream": to_gateway}, ratios)


if __name__ == "__main__":
    main()
