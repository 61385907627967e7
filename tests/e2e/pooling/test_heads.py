"""Scores, classes and results of tokens of small random models equal those of transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from protos.errors import ConfigurationRefused
from protos.steps import PoolShape
from tests.support.pooling import tiny_classifiers, tiny_embedders
from tests.support.pooling.in_process import load_model, make_runner, pool
from worker_svc.devices import open_device
from worker_svc.pooling import PoolRunner
from worker_svc.ranks.layout import RankLayout
from worker_svc.shapes import PoolingDescription
from worker_svc.vllm_adapter.model import VllmModel

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),  # importing transformers
]

SHAPE = PoolShape(48, 4)
PROMPTS = [[5, 6, 7], [9] * 14, [3], [*range(10, 50)]]
# Where the second text begins, for models that see it.
SECOND = [2, 0, 0, 17]
KINDS = get_args(tiny_classifiers.Kind)
LABELS = tiny_classifiers.LABELS
DESCRIPTIONS = {
    "bert-pairs": PoolingDescription("CLS", 1, "classify", None, labels=("LABEL_0",), token_types=True),
    "bert": PoolingDescription("CLS", 3, "classify", "sigmoid", labels=LABELS, token_types=True),
    "roberta": PoolingDescription("CLS", 3, "classify", "softmax", labels=LABELS),
    "modernbert": PoolingDescription("MEAN", 3, "classify", "softmax", labels=LABELS),
    "qwen3": PoolingDescription("LAST", 1, "classify", "sigmoid", labels=("LABEL_0",)),
    "bert-tokens": PoolingDescription("ALL", 3, "token_classify", "softmax", labels=LABELS, token_types=True),
}


def runner_of(model: VllmModel) -> PoolRunner:
    return make_runner(model, SHAPE)


def results(runner: PoolRunner, **asked: Any) -> list[torch.Tensor]:
    """Returns the values of each prompt, [values] or [tokens, values]."""
    return pool(runner, SHAPE, PROMPTS, **asked)


def reference(model: Any, second: list[int] | None) -> list[torch.Tensor]:
    """Returns transformers' logits of each prompt."""
    found = []
    for index, prompt in enumerate(PROMPTS):
        given = {"input_ids": torch.tensor([prompt])}
        if second and second[index]:
            types = [int(place >= second[index]) for place in range(len(prompt))]
            given["token_type_ids"] = torch.tensor([types])
        with torch.inference_mode():
            found.append(model(**given).logits[0])
    return found


ACTIVATIONS: Mapping[str | None, Any] = {
    None: lambda logits: logits,
    "sigmoid": torch.sigmoid,
    "softmax": lambda logits: logits.softmax(-1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_results_equal_those_of_transformers(kind: tiny_classifiers.Kind, tmp_path: Path) -> None:
    """In a graph, with padding, with and without the activation that the model's authors want."""
    original = tiny_classifiers.write(kind, tmp_path)
    model = load_model(tmp_path)
    description = model.description.pooling
    assert description == DESCRIPTIONS[kind]
    runner = runner_of(model)
    second = SECOND if description.token_types else None
    logits = reference(original, second)
    if description.token_types:
        plain = reference(original, None)
        assert (plain[3] - logits[3]).abs().max() > 2e-3  # the types matter
    for active in (None, True, False):
        activation = None if active is False else description.activation
        expected = [ACTIVATIONS[activation](each) for each in logits]
        for found, wanted in zip(
            results(runner, second=second, use_activation=active), expected, strict=True
        ):
            assert found.shape == wanted.shape
            assert (found - wanted).abs().max() < 1e-4


def test_a_model_that_generates_becomes_a_reranker(tmp_path: Path) -> None:
    """As its folder asks, the score is the softmax of "yes" against "no" behind the prompt."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 256, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 64,
    }  # fmt: skip
    qwen = Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True)).eval()
    qwen.save_pretrained(tmp_path)
    words = {"no": 7, "yes": 9, **{f"w{index}": index for index in range(256) if index not in (7, 9)}}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "w0"))).save_pretrained(tmp_path)
    asked = {
        "architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"],
        "method": "from_2_way_softmax",
    }  # fmt: skip
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | asked))
    model = load_model(tmp_path)
    assert model.description.pooling == PoolingDescription(
        "LAST", 1, "classify", "sigmoid", labels=("LABEL_0",)
    )
    for found, logits in zip(results(runner_of(model)), reference(qwen, None), strict=True):
        assert found.item() == pytest.approx(logits[-1, [7, 9]].softmax(-1)[1].item(), abs=1e-4)


@pytest.mark.parametrize(
    ("config", "dimensions"),
    [({"is_matryoshka": True}, ()), ({"matryoshka_dimensions": [16, 8]}, (8, 16)), ({}, None)],
)
def test_matryoshka_models_are_recognized(
    config: dict[str, Any], dimensions: tuple[int, ...] | None, tmp_path: Path
) -> None:
    tiny_embedders.write("causal", tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | config))
    description = VllmModel(tmp_path, open_device("cpu"), dtype="float32", seed=0).description
    assert description.pooling is not None
    assert description.pooling.dimensions == dimensions


def test_an_embedding_model_gives_vectors_of_tokens(tmp_path: Path) -> None:
    from transformers import BertModel

    tiny_embedders.write("mean", tmp_path)
    model = load_model(tmp_path, "token_embed")
    assert model.description.pooling == PoolingDescription("ALL", 20, "token_embed", token_types=True)
    head = model._pooling_head
    assert head is not None
    bert = BertModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for found, prompt in zip(results(runner_of(model)), PROMPTS, strict=True):
        with torch.inference_mode():
            wanted = head(bert(torch.tensor([prompt])).last_hidden_state[0])
        assert (found - torch.nn.functional.normalize(wanted, dim=-1)).abs().max() < 1e-4


def test_embeddings_are_cut_before_they_are_scaled(tmp_path: Path) -> None:
    """A request for fewer dimensions gets the first ones, of length 1."""
    tiny_embedders.write("causal", tmp_path)
    runner = runner_of(load_model(tmp_path))
    raw, cut = results(runner, use_activation=False), results(runner, use_activation=True, dimensions=8)
    for whole, part in zip(raw, cut, strict=True):
        assert torch.allclose(torch.nn.functional.normalize(whole[:8], dim=-1), part, atol=1e-6)


def test_a_task_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    """The refusal lists its tasks and comes before any weights are read."""
    tiny_classifiers.write("roberta", tmp_path)
    with pytest.raises(
        ConfigurationRefused,
        match=r"\(RobertaForSequenceClassification\) is for classify, token_classify, not for embed",
    ):
        load_model(tmp_path, "embed")


def test_several_ranks_are_refused(tmp_path: Path) -> None:
    tiny_embedders.write("causal", tmp_path)
    with pytest.raises(ConfigurationRefused, match="pooling models run on one rank; use --workers for more"):
        VllmModel(tmp_path, open_device("cpu"), dtype="auto", seed=0, layout=RankLayout(0, 2))
