"""A model as its configuration describes it, before any weights are read: architecture, layers and sizes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from worker_svc.shapes.shape_config import AttentionLayer

PoolingMethod = Literal["MEAN", "CLS", "LAST", "ALL"]
"""The pooling of a row's hidden states: mean of its real tokens, first, last, or a result for each token."""

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]
"""The results of a pooling model's graphs."""

Activation = Literal["normalize", "softmax", "sigmoid"]
"""The last function on a vector: scale it to length 1, or make probabilities of the values of classes."""


@dataclass(frozen=True)
class PoolingDescription:
    """How a pooling model turns a prompt into its result."""

    method: PoolingMethod
    """How to pool."""
    size: int
    """Elements of a vector."""
    task: PoolingTask = "embed"
    """The kind of vectors."""
    activation: Activation | None = "normalize"
    """The values' permitted uses."""
    activates: bool = True
    """Whether that is done unless a request says otherwise."""
    labels: tuple[str, ...] = ()
    """Names of the classes, in the order of the values; empty for embeddings."""
    token_types: bool = False
    """Whether the model tells the two texts of a pair apart by the types of their tokens."""
    dimensions: tuple[int, ...] | None = None
    """The sizes that embeddings may be cut to; empty for any, `None` for none."""

    @property
    def of_tokens(self) -> bool:
        """Whether each token has a result."""
        return self.method == "ALL"


@dataclass(frozen=True)
class ModelSize:
    """The sizes that a model's memory use depends on."""

    weight_bytes: int
    """All parameters and buffers; shared memory counts once."""
    width: int
    """Input plus output sizes of all matrices of the widest layer, in elements; see `memory_budget`."""
    hidden_size: int
    """Elements of a token's state between layers."""
    vocab_size: int
    """Elements of a row of logits; 0 for a pooling model."""
    itemsize: int
    """Bytes of an element of weights and activations."""
    adapter_width: int = 0
    """Elements that a layer's LoRA adapters add to `width` in a step with adapters; 0 if it takes none."""


@dataclass(frozen=True)
class ModelDescription:
    """A model as its configuration describes it."""

    architecture: str
    """For example "LlamaForCausalLM"."""
    vocab_size: int
    """Length of a row of logits."""
    max_model_len: int
    """Tokens of context that the model was trained for."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a sequence, ascending."""
    dtype: torch.dtype
    """Type of weights and activations."""
    quantization: str | None
    """Quantization of the weights, by vLLM's name."""
    layers: tuple[AttentionLayer, ...]
    """Attention layers in the model's order."""
    pooling: PoolingDescription | None
    """Set for a pooling model, without layers to cache."""
    default_sampling: Mapping[str, float]
    """Sampling parameters that the model's authors recommend, by their names in generation_config.json."""
