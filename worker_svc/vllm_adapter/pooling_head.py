"""The layers that follow a pooling model: vLLM's pooler as tensors, and ColBERT's projection.

If `config.json` gives the size of ColBERT's projection, vLLM makes it earlier and then fails: on BERT the
module is not initialized yet, on others it misses the weights. So vLLM learns the size from the weights, as
do we.
"""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from protos.errors import ConfigurationRefused
from worker_svc.shapes import Activation, PoolingDescription, PoolingMethod, PoolingTask


@functools.cache
def project_late() -> None:
    """Makes vLLM add the projections of ColBERT models while it loads weights."""
    from vllm.model_executor.models.colbert import ColBERTMixin

    ColBERTMixin.get_colbert_dim_from_config = lambda *_: None


@dataclass(frozen=True)
class LateProjection:
    """Applies the projection that vLLM adds to a pooler's head while it loads weights."""

    head: Any
    """vLLM's."""
    size: int
    """Values of a projected vector."""

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Returns projected states; refuses weights without a projection of this size."""
        found = 0 if self.head.projector is None else self.head.projector.out_features
        if found != self.size:
            raise ConfigurationRefused(
                f"the weights project tokens to {found} values, but config.json names {self.size}; correct its 'dim'"
            )
        projected: torch.Tensor = self.head.projector(states)
        return projected


def late_projection(model: Any, head: Any, hf_config: Any, name: str) -> LateProjection | None:
    """Returns the projection that vLLM adds later, or `None` if the model is complete.

    Refuses a folder without the length of the projected vectors.
    """
    if getattr(model, "colbert_linear", head) is not None or head.projector is not None:
        return None
    for key in ("colbert_dim", "dim", "projection_dim"):
        if size := getattr(hf_config, key, None):
            return LateProjection(head, int(size))
    raise ConfigurationRefused(
        f"{name} does not say how long its vectors are; set 'dim' in config.json to the rows of its linear.weight"
    )


# The first one that a model has is what it is made for, unless its class says that it is for tokens.
_TASKS: tuple[PoolingTask, ...] = ("embed", "classify", "token_embed", "token_classify")
_METHODS: Mapping[str, PoolingMethod] = {
    "MeanPool": "MEAN", "CLSPool": "CLS", "LastPool": "LAST", "AllPool": "ALL",
}  # fmt: skip
_ACTIVATIONS: Mapping[str, Activation | None] = {
    "PoolerNormalize": "normalize", "PoolerMultiLabelClassify": "sigmoid", "PoolerIdentity": None,
}  # fmt: skip

Layer = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class PoolingHead:
    """The end of a pooling model's graph, after its layers."""

    method: PoolingMethod
    """How hidden states are pooled."""
    layers: Sequence[Layer]
    """Projections, classifiers and casts, in order."""
    takes_types: bool
    """Whether the model's embeddings take the types of tokens in place of their ids; see `give_types`."""

    def __call__(self, pooled: torch.Tensor) -> torch.Tensor:
        """Returns float32 vectors [..., size] of pooled states [..., hidden]."""
        for layer in self.layers:
            pooled = layer(pooled)
        return pooled.float()

    def modules(self) -> list[torch.nn.Module]:
        """Returns the layers that may own weights."""
        return [layer for layer in self.layers if isinstance(layer, torch.nn.Module)]


def describe_pooling(
    config: Any, model: Any, layers: Mapping[str, Any], task: PoolingTask | None
) -> tuple[PoolingDescription, PoolingHead]:
    """Describes a pooling model from vLLM's configuration, model and layers by name.

    Refuses a `task` that the model lacks, and pooling that is not served.
    """
    model_config = config.model_config
    name = f"{Path(model_config.model).name} ({model_config.architecture})"
    for layer_name, layer in layers.items():
        params = getattr(getattr(layer, "impl", None), "params", None)
        if (
            params is None
            or params.softcap
            or params.sinks
            or params.slopes
            or params.latent
            or not params.writes
        ):
            raise ConfigurationRefused(
                f"{name} has layers like {layer_name}, which are not served for pooling yet;"
                " choose another model"
            )
    poolers = _poolers_of(model)
    chosen = task or _usual_task(model_config.architecture, poolers)
    if chosen not in poolers:
        served = ", ".join(sorted(poolers)) or "nothing that is served"
        asked = f", not for {task}; change --pooling-task" if task else "; choose another model"
        raise ConfigurationRefused(f"{name} is for {served}{asked}")
    assert chosen is not None
    method, steps, head = _read(poolers[chosen], name)
    if getattr(model, "mlm_head", None) is not None and chosen == "token_classify":
        raise ConfigurationRefused(
            f"{name} has a value for each word of its vocabulary, which is not served; choose another model"
        )
    is_embedding = chosen in ("embed", "token_embed")
    hf_config = model_config.hf_config
    if (projection := late_projection(model, head, hf_config, name)) is not None:
        steps, size = [*steps, projection], projection.size
    else:
        size = _embedding_size(head, model_config, name) if is_embedding else int(hf_config.num_labels)
    takes_types = bool(give_types(model))
    description = PoolingDescription(
        method=method,
        size=size,
        task=chosen,
        activation=_activation_of(head, size, name),
        activates=model_config.pooler_config.use_activation is not False,
        labels=() if is_embedding else _labels(hf_config, size),
        token_types=takes_types and getattr(hf_config, "type_vocab_size", 0) > 1,
        dimensions=_dimensions(model_config) if is_embedding else None,
    )
    return description, PoolingHead(method, steps, takes_types)


def give_types(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Makes encoders take the types of tokens as if they were their ids. Returns the layers that do.

    They read the types from a bit of the ids, in place, which not every device's compiler takes. Given
    embedded words, they need the ids for nothing else.
    """
    found = [each for each in model.modules() if type(each).__name__ in ("BertEmbedding", "RobertaEmbedding")]
    for each in found:
        module: Any = sys.modules[type(each).__module__]
        module._decode_token_type_ids = _as_given  # noqa: SLF001 - the only place that decides
    return found


def _as_given(token_types: torch.Tensor) -> torch.Tensor:
    return token_types


def _poolers_of(model: Any) -> dict[str, Any]:
    pooler = getattr(model, "pooler", None)
    if pooler is None:
        return {}
    by_task: Mapping[str, Any] | None = getattr(pooler, "poolers_by_task", None)
    return dict(by_task) if by_task is not None else dict.fromkeys(pooler.get_supported_tasks(), pooler)


def _usual_task(architecture: str, poolers: Mapping[str, Any]) -> PoolingTask | None:
    if "token_classify" in poolers and "ForTokenClassification" in architecture:
        return "token_classify"
    return next((task for task in _TASKS if task in poolers), None)


def _read(pooler: Any, name: str) -> tuple[PoolingMethod, list[Layer], Any]:
    """Returns how a pooler pools, the layers that follow, and its head."""
    pooling, head = getattr(pooler, "pooling", None), getattr(pooler, "head", None)
    steps: list[Layer] = []
    if hasattr(pooling, "pooling"):  # a pooler with layers of its own in front of the classifier
        method, steps, _ = _read(pooling, name)
    else:
        what = type(pooler if pooling is None else pooling).__name__
        if what not in _METHODS:
            raise ConfigurationRefused(
                f"{name} pools by {what}, which is not served yet; choose another model"
            )
        method = _METHODS[what]
    if head is None:
        raise ConfigurationRefused(
            f"{name} has a pooler without a head, which is not served; choose another model"
        )
    return method, [*steps, *_layers_of(head)], head


def _layers_of(head: Any) -> list[Layer]:
    steps: list[Layer] = []
    if head.head_dtype is not None:
        dtype: torch.dtype = head.head_dtype
        steps.append(lambda states: states.to(dtype))
    layer = getattr(head, "projector", None) or getattr(head, "classifier", None)
    if layer is not None:
        steps.append(layer)
    mean, sigma = getattr(head, "logit_mean", None), getattr(head, "logit_sigma", None)
    if mean is not None:
        steps.append(lambda logits: logits - mean)
    if sigma is not None:
        steps.append(lambda logits: logits / sigma)
    return steps


def _activation_of(head: Any, size: int, name: str) -> Activation | None:
    kind = type(head.activation).__name__
    if kind == "PoolerClassify":
        return "sigmoid" if (head.activation.num_labels or size) == 1 else "softmax"
    if head.activation is not None and kind not in _ACTIVATIONS:
        what = head.activation.extra_repr().removeprefix("fn=") or kind
        raise ConfigurationRefused(f"{name} ends with {what}, which is not served yet; choose another model")
    return _ACTIVATIONS.get(kind)


def _embedding_size(head: Any, model_config: Any, name: str) -> int:
    size = getattr(head.projector, "out_features", None) or getattr(model_config, "embedding_size", None)
    if size is None:
        raise ConfigurationRefused(f"{name} does not say how long its embeddings are; choose another model")
    return int(size)


def _labels(hf_config: Any, size: int) -> tuple[str, ...]:
    names = getattr(hf_config, "id2label", None) or {}
    return tuple(str(names.get(index, f"LABEL_{index}")) for index in range(size))


def _dimensions(model_config: Any) -> tuple[int, ...] | None:
    if not model_config.is_matryoshka:
        return None
    return tuple(sorted(model_config.matryoshka_dimensions or ()))
