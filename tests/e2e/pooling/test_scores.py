"""`triptych up` on a small random cross-encoder: scores over HTTP and gRPC equal those of transformers."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.support.pooling import tiny_classifiers
from tests.support.stack import Stack, running_stack
from worker_svc.model_files.loader import fetch

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),  # importing transformers
]

QUERY = "How many people live in Berlin?"
DOCUMENTS = ["Berlin has 3.7 million inhabitants.", "A cat sits on the mat.", "Paris, too, has people. " * 6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross-encoder with MiniLM's tokenizer."""
    base = tmp_path_factory.mktemp("scorer")
    tiny_classifiers.write("bert-pairs", base, vocab_size=30522)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(fetch("minilm") / name, base)
    return base


@pytest.fixture(scope="module")
def stack(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    shapes = ("--pool-batch-sizes", "1,4", "--pool-prompt-lens", "64,32")
    with running_stack(
        folder, "scorer", tmp_path_factory.mktemp("run"), "--dtype", "float32", *shapes
    ) as stack:
        yield stack


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[float]:
    """The logits of transformers."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        return [
            model(**tokenizer(QUERY, document, return_tensors="pt")).logits.item() for document in DOCUMENTS
        ]


def post(stack: Stack, path: str, **body: Any) -> Any:
    response = httpx.post(f"{stack.base_url}{path}", json=body, timeout=30)
    assert response.status_code == 200, response.text
    return response.json()


def test_scores_equal_those_of_transformers(stack: Stack, expected: list[float]) -> None:
    """Pairs in batches and alone, with token types; its authors want the bare value."""
    data = post(stack, "/score", text_1=QUERY, text_2=DOCUMENTS)["data"]
    assert [entry["score"] for entry in data] == pytest.approx(expected, abs=1e-4)


def test_documents_are_sorted(stack: Stack, expected: list[float]) -> None:
    results = post(stack, "/rerank", query=QUERY, documents=DOCUMENTS)["results"]
    order = sorted(range(3), key=lambda index: -expected[index])
    assert [one["index"] for one in results] == order
    assert results[0]["document"]["text"] == DOCUMENTS[order[0]]
