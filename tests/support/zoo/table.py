"""The rows of docs/models.md: which architecture runs where, and which tests show it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tests.support.zoo import families

_PARITY: Final = "tests/e2e/zoo/test_parity.py"
_MULTIMODAL: Final = "tests/e2e/zoo/test_multimodal.py"
_PREFIXES: Final = "tests/e2e/zoo/test_prefixes.py"
_NPU: Final = "tests/e2e/zoo/test_npu.py"
_MXFP4: Final = "tests/e2e/worker/test_checkpoint_cases.py"
_ALIBI: Final = "tests/e2e/zoo/test_alibi.py"
_LATENT: Final = "tests/unit/worker/devices/test_mla.py"
_SPLIT: Final = "tests/e2e/ranks/test_split_families.py"
_LAYOUTS: Final = "tests/e2e/ranks/test_layouts.py"
_QUANTIZED: Final = "tests/e2e/worker/test_quantized.py"
_LORA: Final = "tests/e2e/lora/test_parity.py"
_LORA_LAYERS: Final = "tests/e2e/lora/test_layers.py"
REFUSALS: Final = "tests/e2e/zoo/test_refusals.py"


@dataclass(frozen=True)
class Row:
    """One architecture that is served."""

    architecture: str
    """As in config.json."""
    models: str
    """Models that people know it by."""
    families: tuple[str, ...]
    """The small models that stand for it; see `families.FAMILIES` and `families.MULTIMODAL`."""
    special: str
    """What its layers have that Llama's have not."""
    shown_by: tuple[str, ...]
    """Test files."""
    features: tuple[str, ...] = ()
    """What else is tested with it: "ranks", "LoRA", "4 and 8 bits"."""

    @property
    def gpu(self) -> str:
        """What a GPU makes of it."""
        if set(self.families) & set(families.NO_GRAPHS_ON_GPU):
            return "without graphs, not shown"
        return self._on(families.NOT_ON_GPU)

    @property
    def npu(self) -> str:
        """What an NPU makes of it."""
        return self._on(families.NOT_ON_NPU)

    def _on(self, refusals: Mapping[str, str]) -> str:
        reasons = sorted({refusals[family] for family in self.families if family in refusals})
        return f"refused: {'; '.join(reasons)}" if reasons else "yes"


ROWS: Final = (
    Row("LlamaForCausalLM", "Llama 2 and 3, SmolLM2", ("llama", "llama3"), "scaled rotary positions in Llama 3", (_PARITY, _NPU, _LAYOUTS, _QUANTIZED, _LORA_LAYERS), ("ranks", "LoRA", "4 and 8 bits")),
    Row("Qwen2ForCausalLM", "Qwen2, Qwen2.5", ("qwen2",), "biases", (_PARITY, _NPU)),
    Row("Qwen3ForCausalLM", "Qwen3", ("qwen3",), "norms of queries and keys", (_PARITY, _NPU, _SPLIT, _LORA), ("ranks", "LoRA")),
    Row("MistralForCausalLM", "Mistral 7B v0.1", ("mistral",), "a window in every layer, so no layer keeps a whole sequence", (_PARITY, _NPU, _PREFIXES)),
    Row("Phi3ForCausalLM", "Phi-3, Phi-4-mini", ("phi3", "phi3-long"), "fused projections, partly rotated heads, rotary factors for long contexts", (_PARITY, _NPU,)),
    Row("GraniteForCausalLM", "Granite 3", ("granite",), "multipliers of embeddings, attention, residuals and logits", (_PARITY, _NPU,)),
    Row("Gemma3ForCausalLM", "Gemma 3 1B and 270M", ("gemma3",), "windows in most layers, a scaled embedding that is also the head", (_PARITY, _NPU, _LAYOUTS, _QUANTIZED), ("ranks", "8 bits")),
    Row("MixtralForCausalLM", "Mixtral", ("mixtral",), "experts", (_PARITY, _NPU, _SPLIT), ("ranks",)),
    Row("Qwen2MoeForCausalLM", "Qwen1.5-MoE, Qwen2-57B-A14B", ("qwen2-moe",), "experts, a shared one with a gate of its own", (_PARITY, _NPU, _SPLIT), ("ranks",)),
    Row("Qwen3MoeForCausalLM", "Qwen3-30B-A3B", ("qwen3-moe",), "experts", (_PARITY, _NPU,)),
    Row("Glm4MoeForCausalLM", "GLM-4.5", ("glm4-moe",), "experts in groups, chosen by sigmoids with a bias; shared experts", (_PARITY, _NPU, _SPLIT), ("ranks",)),
    Row("Ernie4_5_MoeForCausalLM", "ERNIE 4.5", ("ernie-moe",), "experts chosen with a bias; shared experts", (_PARITY, _NPU, _SPLIT), ("ranks",)),
    Row("GraniteMoeForCausalLM", "Granite 3 MoE", ("granite-moe",), "experts, Granite's multipliers", (_PARITY, _NPU,)),
    Row("GptOssForCausalLM", "gpt-oss", ("gpt-oss",), "attention sinks, windows in every second layer, experts with biases and clamped activations", (_PARITY, _NPU, _PREFIXES, _SPLIT, _MXFP4), ("ranks",)),
    Row("Llama4ForCausalLM", "Llama 4, text only", ("llama4",), "sigmoid routing, layers without positions; contexts up to one attention chunk", (_PARITY, _NPU,)),
    Row("DeepseekV2ForCausalLM", "DeepSeek-V2, V2-Lite", ("deepseek-v2", "deepseek-v2-lite"), "latent attention (MLA), experts in groups, shared experts", (_PARITY, _NPU, _PREFIXES, _LATENT, _SPLIT), ("ranks",)),
    Row("DeepseekV3ForCausalLM", "DeepSeek-V3, R1", ("deepseek-v3",), "latent attention (MLA), experts in groups, chosen by sigmoids with a bias", (_PARITY, _NPU, _LATENT)),
    Row("BloomForCausalLM", "BLOOM", ("bloom",), "ALiBi instead of rotary positions", (_PARITY, _NPU, _ALIBI)),
    Row("FalconForCausalLM", "Falcon-RW", ("falcon-rw",), "ALiBi instead of rotary positions", (_PARITY, _NPU, _ALIBI)),
    Row("Gemma3ForConditionalGeneration", "Gemma 3 4B to 27B", ("gemma3-vision",), "text of a multimodal checkpoint", (_MULTIMODAL, _NPU,)),
    Row("Llama4ForConditionalGeneration", "Llama 4 Scout", ("llama4-vision",), "text of a multimodal checkpoint", (_MULTIMODAL, _NPU,)),
    Row("Mistral3ForConditionalGeneration", "Mistral Small 3.1", ("mistral3",), "text of a multimodal checkpoint", (_MULTIMODAL, _NPU,)),
    Row("Qwen2VLForConditionalGeneration", "Qwen2-VL", ("qwen2-vl",), "text of a multimodal checkpoint", (_MULTIMODAL, _NPU,)),
    Row("Qwen2_5_VLForConditionalGeneration", "Qwen2.5-VL", ("qwen2.5-vl",), "text of a multimodal checkpoint", (_MULTIMODAL, _NPU,)),
    Row("Qwen3VLForConditionalGeneration", "Qwen3-VL", ("qwen3-vl",), "text of a multimodal checkpoint", (_MULTIMODAL, _NPU,)),
)  # fmt: skip
"""What is served."""
