"""The stack's tokens equal those of transformers: alone, in a batch, over HTTP and after a worker's death."""

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from tokenizers import Tokenizer

from protos.triptych.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.support.prompts import PROMPTS
from tests.support.stack import Stack

if TYPE_CHECKING:
    from tests.support.reference import Reference

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.stack,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing torch and transformers
]

NUM_TOKENS = 64


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> "Reference":
    """The same model in transformers, in float32."""
    # Not earlier: the quick tests do without torch.
    import torch

    from tests.support.reference import open_reference

    return open_reference(smollm2, torch.float32)


async def generate(stack: Stack, prompts: Sequence[Sequence[int]], **sampling: object) -> list[list[int]]:
    """Runs all prompts concurrently, each in its own call, and returns their tokens."""
    parameters: dict[str, object] = {
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        **sampling,
    }

    async def one(prompt: Sequence[int]) -> list[int]:
        request = inference_pb2.GenerateRequest(
            prompt_token_ids=prompt,
            sampling=common_pb2.SamplingParams(**parameters),  # type: ignore[arg-type]
        )
        return [token async for event in stub.Generate(request) for token in event.token_ids]

    async with stack.open_channel() as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        return await asyncio.gather(*(one(prompt) for prompt in prompts))


@pytest.mark.slow
async def test_cached_prompts_give_the_same_tokens(stack: Stack, reference: "Reference") -> None:
    """The second request with the longest prompt uses cached blocks and gives the same tokens."""
    prompt = max((reference.encode(text) for text in PROMPTS), key=len)
    first, again = [(await generate(stack, [prompt]))[0] for _ in range(2)]
    assert reference.greedy_mismatch(prompt, first) == ""
    assert again == first


async def test_http_gives_the_text_of_the_same_tokens(stack: Stack, tokenizer: Tokenizer) -> None:
    """A prompt of token ids gives the text of the tokens that gRPC gives."""
    prompt = tokenizer.encode(PROMPTS[0]).ids
    expected = tokenizer.decode((await generate(stack, [prompt], ignore_eos=False))[0])
    body = {"model": stack.model, "prompt": prompt, "temperature": 0, "max_tokens": NUM_TOKENS}
    async with httpx.AsyncClient(base_url=stack.base_url, timeout=60) as client:
        answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
    assert answer["choices"][0]["text"] == expected


async def metric(client: httpx.AsyncClient, name: str) -> float:
    """Returns the sum of a metric over its labels."""
    lines = (await client.get("/metrics")).raise_for_status().text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@pytest.mark.slow
async def test_two_choices_share_a_prompt_and_report_log_probabilities(
    stack: Stack, reference: "Reference"
) -> None:
    """With n=2 at temperature 1, each token has transformers' log-probability, streamed or not."""
    prompt = reference.encode(PROMPTS[3])
    body = {
        "model": stack.model, "prompt": prompt, "temperature": 1, "seed": 7, "max_tokens": 16, "ignore_eos": True, "n": 2,
        "logprobs": 3, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    async with httpx.AsyncClient(base_url=stack.base_url, timeout=60) as client:
        before = await metric(client, "triptych:forked_sequences_total")
        answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
        assert await metric(client, "triptych:forked_sequences_total") == before + 1
        streamed: list[list[str]] = [[], []]
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    streamed[choice["index"]] += (choice["logprobs"] or {"tokens": []})["tokens"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["usage"]["completion_tokens"] == 32
    reported = [choice["logprobs"] for choice in answer["choices"]]
    assert streamed == [one["tokens"] for one in reported]
    assert reported[0]["tokens"] != reported[1]["tokens"]
    for one in reported:
        tokens = [int(token.removeprefix("token_id:")) for token in one["tokens"]]
        wanted = reference.logprobs(prompt, tokens)
        for place, (token, logprob) in enumerate(zip(tokens, one["token_logprobs"], strict=True)):
            assert logprob == pytest.approx(float(wanted[place, token]), abs=1e-2)
            top = {
                int(name.removeprefix("token_id:")): value
                for name, value in one["top_logprobs"][place].items()
            }
            assert top[token] == logprob
            highest = sorted(top.values(), reverse=True)[:3]
            assert highest == pytest.approx(wanted[place].topk(3).values.tolist(), abs=1e-2)


async def test_a_worker_killed_during_a_stream_loses_no_token(stack: Stack, tokenizer: Tokenizer) -> None:
    """The launcher restarts the worker, and the scheduler resumes the requests."""
    prompt = tokenizer.encode(PROMPTS[2]).ids
    expected = (await generate(stack, [prompt]))[0]
    received: list[int] = []
    pid = stack.pid("worker-0")
    async with stack.open_channel() as channel:
        request = inference_pb2.GenerateRequest(
            prompt_token_ids=prompt,
            sampling=common_pb2.SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True),
        )
        async for event in inference_pb2_grpc.InferenceStub(channel).Generate(request):
            received += event.token_ids
            # An event without tokens tells that a worker was lost: it must not kill again.
            if len(received) == 10 and event.token_ids:
                os.kill(pid, signal.SIGKILL)
    assert received == expected
    assert stack.pid("worker-0") != pid
