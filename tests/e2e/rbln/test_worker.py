"""A worker on device rbln, with the vendor's packages, and a scheduler."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from protos.triptych.v1 import inference_pb2
from scheduler_svc.replica.scheduler import ReplicaScheduler
from scheduler_svc.settings import Settings
from tests.support import tiny_models
from tests.support.rbln.vendor_packages import running_worker
from tests.support.scheduler.running_scheduler import (
    RunningScheduler,
    collect,
    generate_request,
    run_scheduler,
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.npu,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing transformers
]

CHUNK = 128
# Longer than two chunks, and than the windows of 64 tokens.
PROMPT = [3 + (i * i * 31 + i * 17) % 250 for i in range(300)]
NUM_TOKENS = 6


@dataclass(frozen=True)
class Answer:
    """One sequence's output."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Answers:
    """What a deployment answered to the same requests."""

    alone: list[Answer]
    """The whole prompt, then two others that diverge from it in its second and third chunk."""
    cached: list[int]
    """Tokens of each of these prompts that were cached."""
    choices: list[Answer]
    """Two sampled sequences of one request for another prompt."""
    forks: int
    """Sequences that continued from the prompt of another one."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models with full attention, and with windows besides."""
    base = tmp_path_factory.mktemp("models")
    return {name: tiny_models.write(name, base / name) for name in ("llama", "gemma3")}


def by_sequence(events: list[inference_pb2.GenerateEvent], sequence: int) -> Answer:
    own = [event for event in events if event.sequence == sequence]
    return Answer(
        tuple(token for event in own for token in event.token_ids),
        tuple(entry.logprob for event in own for entry in event.logprobs),
    )


async def ask(scheduler: RunningScheduler) -> Answers:
    alone, cached = [], []
    for prompt in (PROMPT, [*PROMPT[:200], *range(40, 60)], [*PROMPT[:290], 7, 8, 9]):
        request = generate_request(
            prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0
        )
        events = await collect(scheduler.inference.Generate(request))
        alone.append(by_sequence(events, 0))
        cached.append(next(event.prompt.num_cached_tokens for event in events if event.HasField("prompt")))
    request = generate_request(
        PROMPT[::-1], max_tokens=NUM_TOKENS, temperature=1.0, seed=5, ignore_eos=True, logprobs=0
    )
    request.n = 2
    events = await collect(scheduler.inference.Generate(request))
    (replica,) = scheduler.engine.replicas.values()
    assert isinstance(replica.scheduler, ReplicaScheduler)
    return Answers(
        alone, cached, [by_sequence(events, sequence) for sequence in range(2)], replica.scheduler.stats.forks
    )


async def answers_of(folder: Path, variables: dict[str, str], *, caching: bool) -> Answers:
    """Runs a deployment of one worker and asks it."""
    settings = Settings(
        enable_prefix_caching=caching, max_num_seqs=2, max_model_len=512, num_blocks=17, block_size=1024
    )
    async with run_scheduler(settings) as scheduler:
        with running_worker(
            folder, scheduler.port, "--dtype", "float32", "--no-compile-cache", variables=variables
        ):
            assert await scheduler.serving.get()
            return await ask(scheduler)


@pytest.mark.parametrize(
    ("model", "variables", "copies"),
    [
        pytest.param("llama", {}, True, marks=pytest.mark.slow),
        pytest.param("gemma3", {}, True, marks=pytest.mark.slow),
        pytest.param("gemma3", {"RBLN_USE_CUSTOM_KERNEL": "1"}, True, marks=pytest.mark.slow),
        pytest.param("llama", {"VLLM_RBLN_USE_DEVICE_TENSOR": "0"}, True, marks=pytest.mark.slow),
        pytest.param("gemma3", {"VLLM_RBLN_USE_DEVICE_TENSOR": "0"}, False, marks=pytest.mark.slow),
    ],
    ids=["tensors", "windows", "triton", "runtime", "runtime-windows"],
)
async def test_reuse_is_exact(
    folders: dict[str, Path], model: str, variables: dict[str, str], copies: bool
) -> None:
    """Hits inside blocks, hits on windows in place and forks give the bits of a worker that reuses nothing.

    Where the NPU's runtime cannot copy, nothing is reused and nothing fails.
    """
    plain = await answers_of(folders[model], variables, caching=False)
    reusing = await answers_of(folders[model], variables, caching=True)
    assert reusing.alone == plain.alone
    assert reusing.choices == plain.choices
    assert plain.cached == [0, 0, 0]
    assert reusing.cached == ([0, CHUNK, 2 * CHUNK] if copies else [0, 0, 0])
    assert reusing.forks == (1 if copies else 0)
    assert len({*reusing.choices}) == 2


async def random_tokens(folder: Path, *flags: str) -> list[Answer]:
    """Asks a worker with these flags for random tokens, with a seed and without."""
    settings = Settings(max_num_seqs=2, max_model_len=512, num_blocks=17, block_size=1024)
    async with run_scheduler(settings) as scheduler:
        with running_worker(
            folder, scheduler.port, "--dtype", "float32", "--no-compile-cache", *flags, variables={}
        ):
            assert await scheduler.serving.get()
            requests = [
                generate_request(PROMPT[:20], max_tokens=NUM_TOKENS, temperature=1.0, ignore_eos=True)
                for _ in range(2)
            ]
            requests[0].sampling.seed = 5
            events = await asyncio.gather(
                *(collect(scheduler.inference.Generate(request)) for request in requests)
            )
            return [by_sequence(each, 0) for each in events]


async def test_a_seed_is_kept_although_the_npu_draws(folders: dict[str, Path]) -> None:
    """A request with a seed gets the host's tokens, also in steps that draw others on the NPU."""
    seeded, drawn = await random_tokens(folders["llama"], "--sampling-on-device")
    expected, _ = await random_tokens(folders["llama"])
    assert seeded == expected
    assert len(seeded.tokens) == len(drawn.tokens) == NUM_TOKENS


async def test_a_step_that_fails_on_the_npu_runs_again_there(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """A failed chunk or decode step changes no answer and no cached block; neither runs on the host."""
    fault, log = tmp_path / "fault", tmp_path / "log"
    settings = Settings(max_num_seqs=2, max_model_len=512, num_blocks=17, block_size=1024)
    request = generate_request(PROMPT, max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=0)
    flags = ("--dtype", "float32", "--no-compile-cache")
    variables = {"FAKE_REBEL_FAULT": str(fault)}
    async with run_scheduler(settings) as scheduler:
        with (
            log.open("w") as file,
            running_worker(folders["llama"], scheduler.port, *flags, variables=variables, log=file),
        ):
            assert await scheduler.serving.get()
            expected = by_sequence(await collect(scheduler.inference.Generate(request)), 0)
            fault.touch()
            assert by_sequence(await collect(scheduler.inference.Generate(request)), 0) == expected
            assert log.read_text().count('"event": "step_failed"') == 1
            events: list[inference_pb2.GenerateEvent] = []
            async for event in scheduler.inference.Generate(request):
                if not any(each.token_ids for each in events) and event.token_ids:
                    fault.touch()
                events.append(event)
            retried = by_sequence(events, 0)
            assert retried.tokens == expected.tokens
            # Tokens that decode steps had computed were computed again in a chunk.
            assert retried.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
            assert log.read_text().count('"event": "step_failed"') == 2
            events = await collect(scheduler.inference.Generate(request))
            assert by_sequence(events, 0) == expected
            cached = [event.prompt.num_cached_tokens for event in events if event.HasField("prompt")]
            assert cached == [2 * CHUNK]
    assert "Fallback to CPU" not in log.read_text()
