"""Embeddings of the real MiniLM equal those of transformers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from protos.errors import ConfigurationRefused
from protos.steps import Admission, Pool, PoolShape, SlotOutput, StepPlan
from tests.support.sampling_params import pooling_params, sampling_params
from tests.support.worker.harness import load
from worker_svc.devices import open_device
from worker_svc.model_files.loader import fetch
from worker_svc.pooling import PoolRunner
from worker_svc.ranks.layout import RankLayout
from worker_svc.shapes import PoolShapeConfig
from worker_svc.vllm_adapter import startup
from worker_svc.vllm_adapter.model import VllmModel

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

SHAPES = (PoolShape(64, 1), PoolShape(64, 8), PoolShape(256, 4), PoolShape(256, 20))
PACKED = PoolShape(256, 20, packed=True)
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "wise",
    "owls",
    "read",
    "long",
    "books",
    "about",
    "rivers",
    "and",
    "stars",
]
TEXTS = [
    "Hello.",
    "?",
    "Paris is the capital of France.",
    "the cat sat on the mat",
    "A CAT SAT ON A MAT",
    "Ünïcödé wörds, and 日本語 as well",
    "def f(x): return x + 1",
    *(
        " ".join(WORDS[i % len(WORDS)] for i in range(n))
        for n in (2, 3, 5, 8, 13, 21, 34, 55, 89, 120, 144, 180, 230)
    ),
]


@pytest.fixture(scope="module")
def folder() -> Path:
    """The folder of MiniLM."""
    return fetch("minilm")


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    """Token ids of the texts."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer(text).input_ids for text in TEXTS]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> torch.Tensor:
    """The normalized mean of transformers' hidden states."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        means = [model(torch.tensor([prompt])).last_hidden_state[0].mean(dim=0) for prompt in prompts]
    return torch.nn.functional.normalize(torch.stack(means), dim=-1)


@pytest.fixture(scope="module")
def runner(folder: Path) -> PoolRunner:
    """A warmed-up runner with all shapes, in float32, the type that the model was saved in."""
    model = load(folder, "auto")
    assert model.description.dtype == torch.float32
    assert model.description.pooling is not None
    runner = PoolRunner(
        model, open_device("cpu"), model.description.pooling, PoolShapeConfig((*SHAPES, PACKED))
    )
    warmed: list[str] = []
    runner.warm_up(lambda done, total, what: warmed.append(f"{done}/{total} {what}"))
    assert len(warmed) == len(SHAPES) + 2
    return runner


def pooled(
    runner: PoolRunner, prompts: list[list[int]], shape: PoolShape, *, normalize: bool | None = None
) -> list[SlotOutput]:
    """Runs one step with these prompts in slots 0, 1, … of a shape."""
    runner.reset()
    admit = [
        Admission(slot, prompt, 0, sampling_params(), {}, pooling=pooling_params(normalize))
        for slot, prompt in enumerate(prompts)
    ]
    return runner.execute(StepPlan(1, admit=admit, work=Pool(range(len(prompts)), shape)))


def values(outputs: list[SlotOutput]) -> torch.Tensor:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return torch.tensor([output.pooled for output in outputs])


def test_single_prompts_equal_the_reference(
    runner: PoolRunner, prompts: list[list[int]], expected: torch.Tensor
) -> None:
    """Each text in a separate batch, in the smallest shape that holds it."""
    rows = []
    for prompt in prompts:
        shape = SHAPES[0] if len(prompt) <= 64 else SHAPES[2]
        rows.append(values(pooled(runner, [prompt], shape)))
    assert (torch.cat(rows) - expected).abs().max() < 1e-5


def test_a_batch_equals_the_reference(
    runner: PoolRunner, prompts: list[list[int]], expected: torch.Tensor
) -> None:
    """All texts in one batch, in which short ones have much padding."""
    found = values(pooled(runner, prompts, SHAPES[3]))
    assert (found - expected).abs().max() < 1e-5


def test_packed_texts_equal_the_reference(
    runner: PoolRunner, prompts: list[list[int]], expected: torch.Tensor
) -> None:
    """Texts of all lengths that follow one another, and the same texts in the opposite order."""
    short = [index for index, prompt in enumerate(prompts) if len(prompt) <= 64][:5]
    assert sum(len(prompts[index]) for index in short) <= PACKED.prompt_len
    for order in (short, short[::-1]):
        found = values(pooled(runner, [prompts[index] for index in order], PACKED))
        assert (found - expected[order]).abs().max() < 1e-5


def test_padded_rows_change_nothing(runner: PoolRunner, prompts: list[list[int]]) -> None:
    """Texts have the same embeddings in a full batch and beside empty rows."""
    few = [prompt for prompt in prompts if len(prompt) <= 64][:3]
    padded = values(pooled(runner, few, SHAPES[1]))
    full = values(pooled(runner, [*few, *prompts[:5]], SHAPES[1]))
    assert (full[:3] - padded).abs().max() < 1e-6


def test_a_request_can_turn_normalization_off(runner: PoolRunner, prompts: list[list[int]]) -> None:
    """A request's `use_activation` overrides the model's default."""
    raw = values(pooled(runner, prompts[:2], SHAPES[1], normalize=False))
    scaled = values(pooled(runner, prompts[:2], SHAPES[1]))
    assert (raw.norm(dim=-1) - 1).abs().min() > 1e-2
    assert torch.allclose(torch.nn.functional.normalize(raw, dim=-1), scaled, atol=1e-6)
    assert torch.allclose(scaled.norm(dim=-1), torch.ones(2), atol=1e-6)


def test_several_ranks_are_refused(folder: Path) -> None:
    """By each rank, before it registers."""
    startup.prepare("cpu")
    with pytest.raises(ConfigurationRefused, match="pooling models run on one rank; use --workers for more"):
        VllmModel(folder, open_device("cpu"), dtype="auto", seed=0, layout=RankLayout(0, 2))
