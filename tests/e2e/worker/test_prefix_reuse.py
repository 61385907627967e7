"""Real models reuse prefixes, whatever their attention, and the outputs stay the same bit for bit.

The real scheduler and worker exchange their real messages within one process, so that many shapes run
quickly. The last test uses real processes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from protos.service.grpc_options import open_channel
from protos.steps import GroupKind
from protos.triptych.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.support.scheduler.factories import ListSink
from tests.support.scheduler.local_replica import LocalReplica
from tests.support.stack import running_stack
from tests.support.worker.harness import FULL, load
from worker_svc.model_files.loader import fetch

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,  # in the quick tests, tests/e2e/zoo/test_prefixes.py does the same with small models
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing vLLM
]

CHUNK, NUM_TOKENS, PREFIX = 128, 12, 1000


@dataclass(frozen=True)
class Answer:
    """A request's output and how many of its prompt tokens were cached."""

    tokens: list[int]
    logprobs: list[common_pb2.TokenLogprobs]
    cached: int


def ask(replica: LocalReplica, *prompts: Sequence[int]) -> list[Answer]:
    """Runs the prompts together."""
    sinks = [ListSink() for _ in prompts]
    for prompt, sink in zip(prompts, sinks, strict=True):
        replica.submit(prompt, sink, num_tokens=NUM_TOKENS, logprobs=0)
    while replica.step():
        replica.scheduler.kv.check_integrity()
    assert all(sink.events[-1].error is None for sink in sinks)
    return [
        Answer(
            sink.tokens,
            [entry for event in sink.events for entry in event.logprobs],
            sink.events[0].num_cached_tokens,
        )
        for sink in sinks
    ]


def _text(start: int, count: int) -> list[int]:
    """Returns token ids that vary by position and exist in every vocabulary."""
    return [100 + (start * 7919 + i * i * 31 + i * 17) % 20_000 for i in range(count)]


@pytest.fixture(scope="module")
def gemma3() -> Path:
    return fetch("gemma3-270m", None)


MODELS = [
    pytest.param("smollm2", GroupKind.PAGED_WINDOW, 128, id="full"),
    pytest.param("smollm2", GroupKind.PAGED_WINDOW, 512, id="full, blocks of four chunks"),
    pytest.param("gemma3", GroupKind.PAGED_WINDOW, 32, id="hybrid, chunks of four blocks"),
    pytest.param("gemma3", GroupKind.IN_PLACE_WINDOW, 1024, id="hybrid in place, window below block"),
]
if FULL:
    MODELS += [
        pytest.param("gemma3", GroupKind.PAGED_WINDOW, 1024, id="hybrid, window below block"),
        pytest.param("gemma3", GroupKind.IN_PLACE_WINDOW, 512, id="hybrid in place"),
    ]


@pytest.mark.parametrize(("name", "window", "block_size"), MODELS)
def test_a_shared_prefix_is_computed_once_and_nothing_changes(
    name: str, window: GroupKind, block_size: int, request: pytest.FixtureRequest
) -> None:
    """Later requests prefill only what follows the shared 1,000 tokens; the cache changes no output."""
    folder: Path = request.getfixturevalue(name)
    model = load(folder, "bfloat16")
    prompts = [_text(1, PREFIX) + _text(start, length) for start, length in ((2, 30), (3, 200), (4, 90))]
    with_cache = LocalReplica(model, window=window, block_size=block_size, caching=True)
    first = ask(with_cache, prompts[0])
    chunks = with_cache.scheduler.stats.chunks
    second = ask(with_cache, prompts[1])
    boundary = PREFIX // CHUNK * CHUNK
    assert first[0].cached == 0
    assert second[0].cached == boundary
    assert with_cache.scheduler.stats.chunks - chunks == -(-(len(prompts[1]) - boundary) // CHUNK)
    third = ask(with_cache, prompts[2])
    again = ask(with_cache, prompts[1])
    assert third[0].cached == boundary
    assert again[0].cached == (len(prompts[1]) - 1) // CHUNK * CHUNK

    without = LocalReplica(model, window=window, block_size=block_size, caching=False)
    plain = [ask(without, prompt)[0] for prompt in prompts]
    assert [answer.cached for answer in plain] == [0] * len(prompts)
    for cached, uncached in zip([*first, *second, *third, *again], [*plain, plain[1]], strict=True):
        assert cached.tokens == uncached.tokens
        assert cached.logprobs == uncached.logprobs, "the log-probabilities must be equal bit for bit"


def test_concurrent_requests_compute_their_prefix_once(gemma3: Path) -> None:
    """Two of three concurrent requests wait for the first one's prefix and prefill only the rest."""
    prompts = [_text(1, PREFIX) + _text(start, 30) for start in (2, 3, 4)]
    replica = LocalReplica(
        load(gemma3, "bfloat16"), window=GroupKind.IN_PLACE_WINDOW, block_size=512, caching=True
    )
    answers = ask(replica, *prompts)
    assert sorted(answer.cached for answer in answers) == [0, 896, 896]
    assert replica.scheduler.stats.prefill_tokens == PREFIX + 30 + 2 * (PREFIX + 30 - 896)


async def test_a_stack_with_in_place_windows_reuses_a_prefix(gemma3: Path, tmp_path: Path) -> None:
    """In real processes, the second request hits the first one's prefix and has the same output."""
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
