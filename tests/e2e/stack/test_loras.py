"""A whole stack serves LoRA adapters with the tokens of PEFT: mixed, loaded over HTTP, and after faults."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from protos.triptych.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.support.stack import Stack, running_stack
from tests.support.worker.peft_adapters import AdapterSpec, PeftReference, write_adapter

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.stack,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # importing torch and transformers
]

KEY = "an-admin-key"
NUM_TOKENS = 24
TEXTS = ("The capital of France is", "def fibonacci(n):", "Once upon a time")


@pytest.fixture(scope="module")
def adapters(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three adapters."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(smollm2, root / name, AdapterSpec(seed, rank=8))
        for seed, name in enumerate(("a", "b", "c"))
    }


@pytest.fixture(scope="module")
def stack(
    smollm2: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """A stack with two adapter slots and room for two adapters on the host; `a` is a setting."""
    with running_stack(
        smollm2, "base", tmp_path_factory.mktemp("run"), "--dtype", "float32", "--enable-lora",
        "--max-loras", "2", "--max-cpu-loras", "2", "--max-num-seqs", "4", "--max-model-len", "256",
        "--lora-modules", f"a={adapters['a']}",
        TRIPTYCH_ADMIN_API_KEY=KEY,
    ) as running:  # fmt: skip
        yield running


def change(stack: Stack, route: str, body: dict[str, str]) -> httpx.Response:
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.post(f"{stack.base_url}/v1/{route}_lora_adapter", json=body, headers=headers, timeout=60)


async def tokens_of(
    stub: "inference_pb2_grpc.InferenceAsyncStub", prompt: list[int], lora_name: str
) -> list[int]:
    request = inference_pb2.GenerateRequest(
        prompt_token_ids=prompt,
        lora_name=lora_name,
        sampling=common_pb2.SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True),
    )
    return [token async for event in stub.Generate(request) for token in event.token_ids]


async def test_tokens_equal_peft_alone_mixed_and_after_faults(
    stack: Stack, adapters: dict[str, Path], smollm2: Path
) -> None:
    """More adapters than slots and than places on the host, and a worker that is killed meanwhile."""
    reference = PeftReference(smollm2, {name: adapters[name] for name in "abc"})
    for name in "bc":
        assert change(stack, "load", {"lora_name": name, "lora_path": str(adapters[name])}).status_code == 200
    jobs = [(reference.encode(text), name) for name in ("", "a", "b", "c") for text in TEXTS]
    async with stack.open_channel() as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        calls = [asyncio.ensure_future(tokens_of(stub, prompt, name)) for prompt, name in jobs]
        # The first answers are complete, others run or wait.
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        os.kill(stack.pid("worker-0"), signal.SIGKILL)
        answers = await asyncio.gather(*calls)
        assert change(stack, "unload", {"lora_name": "b"}).status_code == 200
        assert change(stack, "load", {"lora_name": "b", "lora_path": str(adapters["b"])}).status_code == 200
        again = await tokens_of(stub, jobs[6][0], "b")
    assert again == answers[6]
    for (prompt, name), answer in zip(jobs, answers, strict=True):
        assert reference.mismatch(name or None, prompt, answer) == "", name
    assert len({tuple(answer) for answer in answers}) == len(answers), "every adapter changes what is said"


def test_an_answer_outlives_the_scheduler_with_its_adapter(stack: Stack) -> None:
    """The adapter is one of `--lora-modules`, so the next scheduler loads it before the answer goes on."""
    body = {
        "model": "a", "prompt": TEXTS[0], "max_tokens": 100, "temperature": 0, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    whole = "".join(texts_of(stack, body))
    answer = texts_of(stack, body)
    begun = [next(answer) for _ in range(8)]
    os.kill(stack.pid("scheduler"), signal.SIGKILL)
    assert "".join([*begun, *answer]) == whole


def texts_of(stack: Stack, body: Mapping[str, object]) -> Iterator[str]:
    """Yields the pieces of a streamed completion."""
    with httpx.stream("POST", f"{stack.base_url}/v1/completions", json=body, timeout=120) as response:
        for line in response.iter_lines():
            _, _, data = line.partition("data: ")
            if data and data != "[DONE]":
                chunk = json.loads(data)
                assert "error" not in chunk, chunk["error"]["message"]
                yield chunk["choices"][0]["text"]


def test_the_base_and_adapters_are_served_beside_one_another(stack: Stack) -> None:
    """By their names, with a metric of vLLM's; the administrator's key is in no log and no command line."""
    for model in ("base", "a"):
        body = {"model": model, "prompt": "hi", "max_tokens": 2}
        answer = httpx.post(f"{stack.base_url}/v1/completions", json=body, timeout=60)
        assert (answer.status_code, answer.json()["model"]) == (200, model)
    assert 'vllm:lora_requests_info{max_lora="2"' in httpx.get(f"{stack.base_url}/metrics").text
    assert not [path for path in stack.run_dir.glob("*.log") if KEY in path.read_text()]
    assert KEY not in Path(f"/proc/{stack.pid('gateway')}/cmdline").read_text()
