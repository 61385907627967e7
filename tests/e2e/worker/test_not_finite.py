"""A model that computes NaN for some tokens: their requests fail by name, and no others."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import grpc
import grpc.aio
import pytest
import torch
from safetensors.torch import load_file, save_file

from protos.errors import NotFinite, TriptychError, from_rpc_error
from protos.triptych.v1 import common_pb2
from tests.support import tiny_models
from tests.support.ranks.replica import CHUNK, Replica, replica
from tests.support.sampling_params import sampling_params
from tests.support.worker.harness import GREEDY, Harness, load, tokens_of
from worker_svc.settings import Backend

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

BROKEN = 250
"""A token whose embedding is NaN."""
GOOD = [[5, 6, 7], [30 + place % 90 for place in range(70)], [9, 8]]
BAD = [11, BROKEN, 12]


def write_broken(folder: Path, rows: slice | int = BROKEN, value: float = torch.nan) -> Path:
    """Writes a model in which a row of the embedding has this value."""
    tiny_models.write("llama", folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][rows] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("backend", ["compiled", pytest.param("eager", marks=pytest.mark.slow)])
def test_a_row_that_is_not_finite_fails_alone(tmp_path: Path, backend: Backend) -> None:
    """In a chunk that samples and one that does not, greedily, sampled and with log-probabilities."""
    model = load(write_broken(tmp_path), "float32", compiled=backend == "compiled")
    harness = Harness(
        model, max_num_seqs=8, chunk=CHUNK, block_size=CHUNK, decode_buckets=(1, 4, 8), backend=backend
    )
    undisturbed = [tokens_of(each) for each in harness.generate(GOOD, 6)]
    assert isinstance(harness.prefill(0, [*BAD, *[5] * 100]).error, NotFinite)
    harness.release([0])
    for sampling in (
        GREEDY,
        sampling_params(temperature=0.0, logprobs=2),
        sampling_params(temperature=1.0, top_p=0.9, top_k=40, min_p=0.1, seed=1),
        sampling_params(temperature=0.0, presence_penalty=1.0, bad_words=[[3]]),
    ):
        firsts = [harness.prefill(slot, prompt) for slot, prompt in enumerate(GOOD)]
        assert isinstance(harness.prefill(3, BAD, sampling).error, NotFinite)
        rest = [harness.decode(range(4)) for _ in range(5)]
        assert all(isinstance(step[3].error, NotFinite) for step in rest)
        for slot, tokens in enumerate(undisturbed):
            assert tokens_of([firsts[slot], *(step[slot] for step in rest)]) == tokens
        harness.release(range(4))
    assert [tokens_of(each) for each in harness.generate(GOOD, 6)] == undisturbed


@pytest.mark.slow
def test_logits_that_are_all_minus_infinity_fail(tmp_path: Path) -> None:
    model = load(write_broken(tmp_path, value=-torch.inf), "float32")
    harness = Harness(model, max_num_seqs=2, chunk=CHUNK, block_size=CHUNK, decode_buckets=(1, 2))
    for sampling in (GREEDY, sampling_params(temperature=1.0, seed=1)):
        assert isinstance(harness.prefill(0, BAD, sampling).error, NotFinite)
        harness.release([0])


def failure_of(running: Replica, prompt: list[int], parameters: common_pb2.SamplingParams) -> TriptychError:
    """Returns the error of a request that fails."""
    with pytest.raises(grpc.RpcError) as raised:
        running.ask(prompt, parameters)
    return from_rpc_error(cast("grpc.aio.AioRpcError", raised.value))


@pytest.mark.slow
def test_a_broken_request_is_named_and_counted_and_leaves_no_prefix(tmp_path: Path) -> None:
    """A request that meets a broken token while it decodes fails then; those beside it do not notice."""
    with replica(
        tiny_models.write("llama", tmp_path / "sound"), tmp_path, flags=("--dtype", "float32")
    ) as sound:
        answers = sound.generate_all(GOOD, 40, {"temperature": 0.0})
    met = next(
        token for token in answers[1] if token not in {*answers[0], *answers[2], *itertools.chain(*GOOD)}
    )
    folder = write_broken(tmp_path / "model", [met, BROKEN])  # type: ignore[arg-type]
    greedy = common_pb2.SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompt = [*BAD, *[5] * (3 * CHUNK)]
    with replica(folder, tmp_path, flags=("--dtype", "float32")) as running:
        with ThreadPoolExecutor(3) as pool:
            beside = [pool.submit(running.ask, GOOD[index], greedy) for index in (0, 2)]
            error = failure_of(running, GOOD[1], greedy)
            assert [each.result()[0].tokens for each in beside] == [answers[0], answers[2]]
        assert isinstance(error, NotFinite)
        assert error.message.startswith("the model computed NaN or infinity for request ")
        for failed in (2, 3):
            assert isinstance(failure_of(running, prompt, greedy), NotFinite)
            assert running.count("triptych:not_finite_requests_total") == failed
        assert running.count("vllm:prefix_cache_hits_total") == 0
        assert running.generate_all([GOOD[0], GOOD[2]], 40, {"temperature": 0.0}) == [answers[0], answers[2]]
