"""Gemma 2, with soft-capped scores and a window in every other layer, gives the tokens of transformers."""

from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from protos.steps import GroupKind
from tests.support.worker.harness import Harness, load, tokens_of
from worker_svc.settings import Backend

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore"),  # importing vLLM and transformers
]

WINDOW, NUM_TOKENS = 32, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model whose scores are so large that the cap changes its tokens."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=500, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, query_pre_attn_scalar=4, max_position_embeddings=256,
        sliding_window=WINDOW, attn_logit_softcapping=2.0, final_logit_softcapping=5.0, initializer_range=0.1,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config)
    with torch.no_grad():
        # Scores far above the cap, and embeddings small enough that the layers' outputs matter.
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(5)
        model.model.embed_tokens.weight.mul_(0.2)
    path = tmp_path_factory.mktemp("gemma2")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Prompts shorter and longer than a chunk and a window."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 500, (length,), generator=generator).tolist() for length in (5, 33, 90)]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """The reference's greedy continuations."""
    return [continue_(folder, prompt, softcap=2.0) for prompt in prompts]


def continue_(folder: Path, prompt: list[int], softcap: float | None) -> list[int]:
    model = Gemma2ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", attn_logit_softcapping=softcap
    ).eval()
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_the_cap_matters(folder: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Without the cap the reference gives other tokens, so the tests below would notice its absence."""
    assert continue_(folder, prompts[-1], softcap=None) != expected[-1]


@pytest.mark.parametrize("windows", [GroupKind.PAGED_WINDOW, GroupKind.IN_PLACE_WINDOW])
@pytest.mark.parametrize("backend", ["compiled", "eager"])
def test_tokens_equal_the_references(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], windows: GroupKind, backend: Backend
) -> None:
    harness = Harness(
        load(folder, "float32"), max_model_len=128, max_num_seqs=4, chunk=32, block_size=32,
        decode_buckets=(1, 4), window_kind=windows, backend=backend,
    )  # fmt: skip
    assert [tokens_of(outputs) for outputs in harness.generate(prompts, NUM_TOKENS)] == expected
