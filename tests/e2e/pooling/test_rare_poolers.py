"""ColBERT, reward models and calibrated logits equal transformers; SPLADE and step poolers are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    ModernBertConfig,
    ModernBertModel,
    Qwen2Config,
    Qwen2Model,
)

from protos.errors import ConfigurationRefused
from protos.steps import PoolShape
from tests.support.pooling import tiny_classifiers
from tests.support.pooling.in_process import load_model, make_runner, pool
from worker_svc.shapes import PoolingDescription

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),  # importing transformers
]

SHAPE = PoolShape(16, 3)
PROMPTS = [[5, 6, 7], [9] * 14, [3]]
SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def save(model: Any, folder: Path, prefix: str, more: dict[str, torch.Tensor], **config: Any) -> None:
    """Saves a model with further weights, as an architecture that transformers does not have."""
    model.save_pretrained(
        folder, state_dict={f"{prefix}.{name}": tensor for name, tensor in model.state_dict().items()} | more
    )
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def states_of(model: Any) -> list[torch.Tensor]:
    """Returns transformers' last hidden states of each prompt."""
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]


def bert() -> Any:
    torch.manual_seed(0)
    return BertModel(BertConfig(**SIZES), add_pooling_layer=False).eval()


def test_colbert_gives_a_projected_vector_for_each_token(tmp_path: Path) -> None:
    model, projection = bert(), torch.randn(16, 48)
    save(model, tmp_path, "bert", {"linear.weight": projection}, architectures=["HF_ColBERT"], dim=16)
    check_colbert(tmp_path, model, projection, PoolingDescription("ALL", 16, "token_embed", token_types=True))


@pytest.mark.parametrize("staged", [False, True])
def test_colbert_on_modernbert(staged: bool, tmp_path: Path) -> None:
    """The same with another encoder, also with the projection in a Dense stage of Sentence Transformers."""
    torch.manual_seed(0)
    marks = {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2, "local_attention": 8}
    model, projection = ModernBertModel(ModernBertConfig(**SIZES, **marks)).eval(), torch.randn(16, 48)
    architectures, weights = ["ColBERTModernBertModel"], {"linear.weight": projection}
    if staged:
        save(model, tmp_path, "model", {}, architectures=architectures)
        write_dense(tmp_path, weights)
    else:
        save(model, tmp_path, "model", weights, architectures=architectures, colbert_dim=16)
    check_colbert(tmp_path, model, projection, PoolingDescription("ALL", 16, "token_embed"))


def write_dense(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    stages = (("", "sentence_transformers.models.Transformer"), ("1_Dense", "pylate.models.Dense.Dense"))
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": kind}
        for index, (path, kind) in enumerate(stages)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    dense = {
        "in_features": 48,
        "out_features": 16,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    (folder / "1_Dense").mkdir()
    (folder / "1_Dense" / "config.json").write_text(json.dumps(dense))
    save_file(weights, folder / "1_Dense" / "model.safetensors")


def check_colbert(
    folder: Path, model: Any, projection: torch.Tensor, description: PoolingDescription
) -> None:
    served = load_model(folder)
    assert served.description.pooling == description
    found = pool(make_runner(served, SHAPE), SHAPE, PROMPTS)
    for each, states in zip(found, states_of(model), strict=True):
        wanted = torch.nn.functional.normalize(states @ projection.T, dim=-1)
        assert (each - wanted).abs().max() < 1e-4


def test_colbert_without_its_dimension_is_refused(tmp_path: Path) -> None:
    more = {"linear.weight": torch.randn(16, 48)}
    save(bert(), tmp_path, "bert", more, architectures=["HF_ColBERT"])
    with pytest.raises(
        ConfigurationRefused, match=r"set 'dim' in config\.json to the rows of its linear\.weight"
    ):
        load_model(tmp_path)


def test_colbert_with_another_dimension_is_refused(tmp_path: Path) -> None:
    more = {"linear.weight": torch.randn(16, 48)}
    save(bert(), tmp_path, "bert", more, architectures=["HF_ColBERT"], dim=24)
    with pytest.raises(ConfigurationRefused, match=r"project tokens to 16 values, but config\.json names 24"):
        make_runner(load_model(tmp_path), SHAPE)


def reward_model(folder: Path, architecture: str) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = Qwen2Model(Qwen2Config(**SIZES, num_key_value_heads=2)).eval()
    size = 2 if "Process" in architecture else 1
    head = {
        "score.0.weight": torch.randn(48, 48), "score.0.bias": torch.randn(48), "score.2.weight": torch.randn(size, 48),
        "score.2.bias": torch.randn(size),
    }  # fmt: skip
    save(model, folder, "model", head, architectures=[architecture])
    return model, head


def test_a_reward_model_scores_each_token(tmp_path: Path) -> None:
    """Two layers follow the last hidden states."""
    model, head = reward_model(tmp_path, "Qwen2ForRewardModel")
    served = load_model(tmp_path)
    assert served.description.pooling is not None
    assert (served.description.pooling.method, served.description.pooling.size) == ("ALL", 1)
    found = pool(make_runner(served, SHAPE), SHAPE, PROMPTS, use_activation=False)
    for each, states in zip(found, states_of(model), strict=True):
        inner = torch.relu(states @ head["score.0.weight"].T + head["score.0.bias"])
        wanted = inner @ head["score.2.weight"].T + head["score.2.bias"]
        assert (each - wanted).abs().max() < 1e-3


def test_a_process_reward_model_is_refused(tmp_path: Path) -> None:
    reward_model(tmp_path, "Qwen2ForProcessRewardModel")
    with pytest.raises(ConfigurationRefused, match=r"pools by StepPool, which is not served yet"):
        load_model(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_sparse_vectors_are_refused(tmp_path: Path, tied: bool) -> None:
    """SPLADE is refused by name, also if the checkpoint omits the decoder because it is tied."""
    torch.manual_seed(0)
    BertForMaskedLM(BertConfig(**SIZES, tie_word_embeddings=tied)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "architectures": ["BertSpladeSparseEmbeddingModel"]})
    )
    with pytest.raises(ConfigurationRefused, match=r"sparse vectors \(SPLADE\), which are not served"):
        load_model(tmp_path)


def test_a_masked_language_model_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    BertForMaskedLM(BertConfig(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationRefused, match="has a value for each word of its vocabulary"):
        load_model(tmp_path, "token_classify")


def test_logits_are_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean and the deviation that vLLM's pooler names apply before the activation."""
    original = tiny_classifiers.write("qwen3", tmp_path)
    from vllm.model_executor.layers.pooler.seqwise.heads import ClassifierPoolerHead

    init = ClassifierPoolerHead.__init__

    def calibrated(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs | {"logit_mean": 0.75, "logit_sigma": 2.5})

    monkeypatch.setattr(ClassifierPoolerHead, "__init__", calibrated)
    found = pool(make_runner(load_model(tmp_path), SHAPE), SHAPE, PROMPTS)
    for each, prompt in zip(found, PROMPTS, strict=True):
        with torch.inference_mode():
            logits = original(torch.tensor([prompt])).logits[0]
        assert (each - torch.sigmoid((logits - 0.75) / 2.5)).abs().max() < 1e-4
