"""`triptych up` on the real MiniLM: embeddings over HTTP and gRPC, from real processes."""

import math
from collections.abc import Iterator

import grpc
import httpx
import pytest
from openai import OpenAI

from protos.triptych.v1 import inference_pb2, inference_pb2_grpc
from tests.support.stack import Stack, run_example, running_stack
from worker_svc.model_files.loader import fetch

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

TEXTS = ["A cat sits on the mat.", "On a rug, a kitten is sitting.", "The stock market fell by two percent."]


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack whose shapes come from the reference's variables."""
    shapes = {"VLLM_SPYRE_WARMUP_BATCH_SIZES": "1,8,2", "VLLM_SPYRE_WARMUP_PROMPT_LENS": "32,32,128"}
    with running_stack(
        fetch("minilm"), "minilm", tmp_path_factory.mktemp("minilm"), "--max-num-seqs", "4", **shapes
    ) as stack:
        assert "/v1/embeddings" in stack.example
        yield stack


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def test_similar_sentences_have_similar_embeddings(minilm: Stack) -> None:
    with OpenAI(base_url=f"{minilm.base_url}/v1", api_key="unused") as client:
        answer = client.embeddings.create(model="minilm", input=TEXTS)
    cat, kitten, market = (entry.embedding for entry in answer.data)
    assert len(cat) == 384
    assert dot(cat, cat) == pytest.approx(1, abs=1e-5)
    assert dot(cat, kitten) > 0.5
    assert dot(cat, market) < 0.2
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 9 + 11 + 10


def test_grpc_and_http_agree(minilm: Stack) -> None:
    prompt = [101, 1037, 4937, 102]
    with grpc.insecure_channel(minilm.scheduler_address) as channel:
        inference = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.PoolRequest(prompt_token_ids=prompt)
        token = (("authorization", f"Bearer {minilm.token_file.read_text().strip()}"),)
        alone = list(inference.Pool(request, timeout=20, metadata=token).values)
    many = [prompt, *([101, *range(2000, 2000 + n), 102] for n in range(1, 40))]
    data = httpx.post(f"{minilm.base_url}/v1/embeddings", json={"input": many}, timeout=30).json()["data"]
    assert len(data) == 40
    assert data[0]["embedding"] == pytest.approx(alone, abs=1e-5)
    assert all(math.isclose(dot(one["embedding"], one["embedding"]), 1, abs_tol=1e-4) for one in data)


def test_scores_are_cosines(minilm: Stack) -> None:
    with OpenAI(base_url=f"{minilm.base_url}/v1", api_key="unused") as client:
        cat, *others = (
            entry.embedding for entry in client.embeddings.create(model="minilm", input=TEXTS).data
        )
    answer = httpx.post(
        f"{minilm.base_url}/score", json={"text_1": TEXTS[0], "text_2": TEXTS[1:]}, timeout=20
    )
    found = [entry["score"] for entry in answer.json()["data"]]
    assert found == pytest.approx([dot(cat, other) for other in others], abs=1e-5)
    ranked = httpx.post(
        f"{minilm.base_url}/rerank", json={"query": TEXTS[0], "documents": [TEXTS[2], TEXTS[1]]}, timeout=20
    )
    assert [one["index"] for one in ranked.json()["results"]] == [1, 0]


def test_the_example_compares_sentences(minilm: Stack) -> None:
    same, near, far = (float(line.split()[0]) for line in run_example("embeddings.py", minilm))
    assert same == 1
    assert near > 0.5 > far
