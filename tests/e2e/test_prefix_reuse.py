"""Prefixes are reused on real models, whatever their attention, and what comes out does not change by a bit.

Scheduler and worker of the product, joined by their real messages in one process, so that many geometries can be tried quickly; the last
test asks real processes.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from protos.triptych.v1 import common_pb2, inference_pb2, inference_pb2_grpc, worker_pb2
from protos.wire import open_channel
from scheduler_svc import convert as scheduler_convert
from scheduler_svc.engine import AttachedReplica, Engine, ServedModel, Submission
from scheduler_svc.geometry import Geometry as SchedulerGeometry
from scheduler_svc.geometry import GroupKind as SchedulerKind
from scheduler_svc.geometry import KvGroup
from scheduler_svc.kv_cache import CacheOptions, KvCache
from scheduler_svc.policy.interleave import Interleave
from scheduler_svc.policy.order import ArrivalOrder
from scheduler_svc.request import Logprobs
from scheduler_svc.sampling import SamplingParams
from scheduler_svc.scheduler import ReplicaScheduler
from tests.e2e.conftest import running_stack
from tests.scheduler_factories import ListSink
from tests.worker_harness import load
from worker_svc import convert as worker_convert
from worker_svc.devices import open_device
from worker_svc.geometry import Geometry, GroupKind, group_layers
from worker_svc.kv_cache import count_blocks
from worker_svc.models import fetch
from worker_svc.runner import Runner
from worker_svc.vllm_adapter.engine import VllmModel

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing vLLM
]

CHUNK, NUM_TOKENS, PREFIX = 128, 12, 1000


@dataclass(frozen=True)
class Answer:
    """What a request gave: tokens, their log-probabilities to the last bit, and how much of its prompt was cached."""

    tokens: list[int]
    logprobs: list[Logprobs]
    cached: int


class Replica:
    """One worker's runner driven by the scheduler."""

    def __init__(
        self, model: VllmModel, *, window: GroupKind, block_size: int, caching: bool, kv_bytes: int = 1 << 30
    ) -> None:
        layers = group_layers(model.description.layers, window)
        sizes = Geometry(2048, 4, CHUNK, block_size, (1, 2, 4), windows_kept_per_slot=4 if caching else 0)
        blocks = count_blocks(layers, sizes, kv_bytes)
        self.runner = Runner(
            model,
            open_device("cpu"),
            layers,
            Geometry(2048, 4, CHUNK, block_size, (1, 2, 4), blocks, 4 if caching else 0),
        )
        groups = [KvGroup(SchedulerKind[group.kind.name], group.window) for group in layers]
        geometry = SchedulerGeometry(2048, 4, CHUNK, block_size, (1, 2, 4))
        self.engine = Engine(
            max_waiting=100, max_waiting_tokens=10**6, clock=time.monotonic, order=ArrivalOrder()
        )
        self.engine.model = ServedModel(
            2048, model.description.vocab_size, frozenset({"logprobs"}), 5, frozenset()
        )
        kv = KvCache(geometry, groups, blocks, model="m", options=CacheOptions(prefix_caching=caching))
        self.scheduler = ReplicaScheduler(geometry, kv, self.engine, Interleave(1), clock=time.monotonic)
        self.engine.attach("r", AttachedReplica(self.scheduler, lambda: None))
        self._count = 0

    def ask(self, *prompts: Sequence[int]) -> list[Answer]:
        """Runs the prompts together; greedy."""
        sinks = []
        for prompt in prompts:
            self._count += 1
            sampling = SamplingParams(
                temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, max_tokens=NUM_TOKENS,
                stop_token_ids=frozenset(), ignore_eos=True, logprobs=0,
            )  # fmt: skip
            sinks.append(ListSink())
            submission = Submission(f"r{self._count}", tuple(prompt), sampling, NUM_TOKENS)
            self.engine.submit(submission, sinks[-1])
        while True:
            self.engine.dispatch()
            if (plan := self.scheduler.step()) is None:
                break
            message = worker_pb2.StepPlan.FromString(
                scheduler_convert.plan_to_proto(plan).SerializeToString()
            )
            received = worker_convert.plan_from_proto(message)
            result = worker_convert.result_to_proto(received, self.runner.execute(received), 0)
            self.scheduler.update(scheduler_convert.result_from_proto(result))
            self.scheduler.kv.check_integrity()
        for sink in sinks:
            assert sink.events[-1].error is None
        return [
            Answer(
                sink.tokens,
                [entry for event in sink.events for entry in event.logprobs],
                sink.events[0].num_cached_tokens,
            )
            for sink in sinks
        ]


def _text(start: int, count: int) -> list[int]:
    """Token ids that differ from place to place, all in every vocabulary."""
    return [100 + (start * 7919 + i * i * 31 + i * 17) % 20_000 for i in range(count)]


@pytest.fixture(scope="module")
def gemma3() -> Path:
    return fetch("gemma3-270m", None)


MODELS = [
    pytest.param("smollm2", GroupKind.PAGED_WINDOW, 128, id="full"),
    pytest.param("smollm2", GroupKind.PAGED_WINDOW, 512, id="full, blocks of four chunks"),
    pytest.param("gemma3", GroupKind.PAGED_WINDOW, 32, id="hybrid, chunks of four blocks"),
    pytest.param("gemma3", GroupKind.PAGED_WINDOW, 1024, id="hybrid, window below block"),
    pytest.param("gemma3", GroupKind.IN_PLACE_WINDOW, 512, id="hybrid in place"),
    pytest.param("gemma3", GroupKind.IN_PLACE_WINDOW, 1024, id="hybrid in place, window below block"),
]


@pytest.mark.parametrize(("name", "window", "block_size"), MODELS)
def test_a_shared_prefix_is_computed_once_and_nothing_changes(
    name: str, window: GroupKind, block_size: int, request: pytest.FixtureRequest
) -> None:
    """1,000 common tokens: the later requests prefill the rest alone, and give what they give without a cache."""
    folder: Path = request.getfixturevalue(name)
    model = load(folder, "bfloat16")
    prompts = [_text(1, PREFIX) + _text(start, length) for start, length in ((2, 30), (3, 200), (4, 90))]
    with_cache = Replica(model, window=window, block_size=block_size, caching=True)
    first = with_cache.ask(prompts[0])
    chunks = with_cache.scheduler.stats.chunks
    second = with_cache.ask(prompts[1])
    boundary = PREFIX // CHUNK * CHUNK
    assert first[0].cached == 0
    assert second[0].cached == boundary
    assert with_cache.scheduler.stats.chunks - chunks == -(-(len(prompts[1]) - boundary) // CHUNK)
    third = with_cache.ask(prompts[2])
    again = with_cache.ask(prompts[1])
    assert third[0].cached == boundary
    assert again[0].cached == (len(prompts[1]) - 1) // CHUNK * CHUNK

    without = Replica(model, window=window, block_size=block_size, caching=False)
    plain = [without.ask(prompt)[0] for prompt in prompts]
    assert [answer.cached for answer in plain] == [0] * len(prompts)
    for mine, theirs in zip([*first, *second, *third, *again], [*plain, plain[1]], strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.logprobs == theirs.logprobs, "not a bit differs"


def test_requests_that_come_together_compute_their_prefix_once(gemma3: Path) -> None:
    """Three at once, in place: two wait for the first one's prefix and then prefill the rest alone."""
    prompts = [_text(1, PREFIX) + _text(start, 30) for start in (2, 3, 4)]
    replica = Replica(
        load(gemma3, "bfloat16"), window=GroupKind.IN_PLACE_WINDOW, block_size=512, caching=True
    )
    answers = replica.ask(*prompts)
    assert sorted(answer.cached for answer in answers) == [0, 896, 896]
    assert replica.scheduler.stats.prefill_tokens == PREFIX + 30 + 2 * (PREFIX + 30 - 896)


async def test_a_stack_with_windows_in_place_reuses_a_prefix(gemma3: Path, tmp_path: Path) -> None:
    """Over the wire, in processes of their own: the second request finds the first one's prefix and says the same."""
    flags = ("--max-model-len", "2048", "--block-size", "512", "--max-num-seqs", "4")
    threads = {"TRIPTYCH_WINDOW_KV": "in-place", "TRIPTYCH_CPU_THREADS": "1"}
    with running_stack(gemma3, "gemma3", tmp_path, *flags, **threads) as stack:
        async with open_channel(stack.scheduler_address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            ask = inference_pb2.GenerateRequest(
                prompt_token_ids=_text(1, PREFIX + 30),
                sampling=common_pb2.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
            )
            answers = [[event async for event in stub.Generate(ask)] for _ in range(2)]
    assert [events[0].prompt.num_cached_tokens for events in answers] == [0, (PREFIX + 29) // CHUNK * CHUNK]
    first, second = [[token for event in events for token in event.token_ids] for events in answers]
    assert first == second
