"""LoRA adapters in vLLM's linear layers: the layers that take them, and their products."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from protos.errors import InvalidArgument
from worker_svc.devices.base import Device
from worker_svc.devices.lora_stack import MOST_PARTS, LayerWeights, LoraStack, StackShape
from worker_svc.lora.checkpoint import AdapterCheckpoint, LoraLimits

# The names that checkpoints give to the parts of fused layers, where a model's class does not say.
_USUAL_PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
# Latent attention reads these weights itself, past the layer.
_READ_DIRECTLY = ("kv_b_proj",)


@dataclass(frozen=True)
class _Part:
    """A part of a layer's outputs: this rank's rows of its own B, and the outputs on all ranks."""

    rows: slice
    whole: int

    @property
    def size(self) -> int:
        return int(self.rows.stop - self.rows.start)


@dataclass(frozen=True)
class _Layer:
    """A linear layer that takes adapters."""

    module: Any
    inputs: slice
    """This rank's inputs among all of A's."""
    whole_inputs: int
    parts: tuple[_Part, ...]


class _Selection:
    """The adapters of the running step's rows, shared by all layers of a model."""

    rows: torch.Tensor | None = None


class _AdaptedMethod:
    """A layer's product with that of the rows' adapters. vLLM's layers call `apply`."""

    def __init__(self, base: Any, stack: LoraStack, selection: _Selection) -> None:
        self._base = base
        self._stack = stack
        self._selection = selection

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows = self._selection.rows
        if rows is None:
            out: torch.Tensor = self._base.apply(layer, x, bias)
            return out
        return self._stack.apply(lambda: self._base.apply(layer, x, bias), x, bias, rows)


class AdaptedLayers:
    """The layers of a model that take adapters, on this rank. Implements `lora.store.AdaptedModel`."""

    def __init__(
        self,
        model: torch.nn.Module,
        limits: LoraLimits,
        device: Device,
        *,
        architecture: str,
        dtype: torch.dtype,
    ) -> None:
        """Finds the layers of vLLM's model without weights; allocates nothing.

        `architecture` is the name of its class, for errors, and `dtype` that of weights and activations.
        """
        self._architecture = architecture
        self._device = device
        self.limits = limits
        """How many adapters the device holds."""
        self._dtype: torch.dtype = dtype if limits.dtype == "auto" else getattr(torch, limits.dtype)
        self._activations = dtype
        self._selection = _Selection()
        mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
        # A part of a fused layer keeps its name: its matrices are not the whole layer's.
        self._mapper: Any = mapper and replace(mapper, orig_to_new_stacked={})
        self._layers: dict[str, _Layer] = {}
        # By a layer's path in checkpoints: the layer, and which of its parts; None for all.
        self._places: dict[str, tuple[str, int | None]] = {}
        # Paths in checkpoints of layers that take none, and the path of the layer of this model.
        self._unadapted: dict[str, str] = {}
        # Layers of this model whose parts checkpoints may name one by one.
        self._fused: set[str] = set()
        self._stacks: dict[str, LoraStack] = {}
        packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", None) or {}
        self._elsewhere: list[str] = []
        first_paths: dict[int, str] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            if type(module).__name__ == "PPMissingLayer":
                self._elsewhere.append(f"{path}.")
            layer = _layer_of(module, path.rpartition(".")[2])
            names = _names_of(path, packed)
            if len(set(names)) > 1:
                self._fused.add(path)
            if layer is not None:
                # Layers may have several paths, such as shared experts.
                first = first_paths.setdefault(id(module), path)
                self._layers.setdefault(first, layer)
                self._places.update((place, (first, part)) for place, part in _places_of(path, layer, packed))
            elif isinstance(module, LinearBase | VocabParallelEmbedding):
                self._unadapted.update(dict.fromkeys(names, path))

    def shapes(self) -> Iterator[tuple[str, StackShape]]:
        """Yields each layer's path and the sizes of its adapters."""
        rank = self.limits.max_rank + self.limits.max_rank % 2  # kernels take pairs
        for path, layer in self._layers.items():
            inputs, outputs = layer.inputs.stop - layer.inputs.start, tuple(part.size for part in layer.parts)
            yield (
                path,
                StackShape(inputs, outputs, self.limits.max_loras, rank, self._dtype, self._activations),
            )

    @property
    def num_bytes(self) -> int:
        """Memory of all adapter slots on the device."""
        return sum(self._device.adapter_bytes(shape) for _, shape in self.shapes())

    @property
    def width(self) -> int:
        """The most elements per token that the adapters of a decoder layer compute."""
        widths: dict[str, int] = {}
        for path, shape in self.shapes():
            number = next((part for part in path.split(".") if part.isdecimal()), "")
            inner = len(shape.out_sizes) * shape.columns
            widths[number] = widths.get(number, 0) + 2 * inner + shape.in_size + 2 * sum(shape.out_sizes)
        return max(widths.values(), default=0)

    def attach(self) -> None:
        """Allocates the adapter slots and makes the layers use them. Called once, when weights are loaded."""
        for path, shape in self.shapes():
            module = self._layers[path].module
            self._stacks[path] = stack = self._device.lora_stack(shape)
            if type(module.quant_method) is UnquantizedLinearMethod:
                stack.join(module.weight)
            module.quant_method = _AdaptedMethod(module.quant_method, stack, self._selection)
            self._shape = shape

    def adapted(self, step: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Returns a step with another argument: the rows' selection of adapters, [tokens, …]."""
        selection = self._selection

        def run(token_ids: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            selection.rows = rows
            result = step(token_ids, places)
            selection.rows = None
            return result

        return run

    def end_step(self) -> None:
        """Forgets the selection of a failed step."""
        self._selection.rows = None

    def select(self, slots: torch.Tensor) -> torch.Tensor:
        """See `lora.store.AdaptedModel`."""
        return self._device.select_adapters(slots, self._shape)

    def fit(self, checkpoint: AdapterCheckpoint) -> dict[str, LayerWeights]:
        """See `lora.store.AdaptedModel`. Refuses unknown layers, other sizes, and missing targets."""
        found: dict[str, list[tuple[torch.Tensor, torch.Tensor] | None]] = {}
        adapted: set[tuple[str, int | None]] = set()
        for path, (a, b) in checkpoint.matrices.items():
            place = self._place(path, checkpoint.name)
            if place is None:
                continue
            layer_path, part = place
            adapted.add(place)
            layer = self._layers[layer_path]
            _check_sizes(checkpoint.name, path, layer, part, a, b)
            parts = found.setdefault(layer_path, [None] * len(layer.parts))
            dtype = self._dtype
            if not bool(a.to(dtype).isfinite().all() and b.to(dtype).isfinite().all()):
                raise InvalidArgument(
                    f"adapter {checkpoint.name}: the matrices of {path} exceed {dtype}; see --lora-dtype",
                    param="source",
                )
            mine = a[:, layer.inputs].to(dtype).contiguous()
            start = 0
            for index, each in enumerate(layer.parts):
                if part is None:
                    whole = b[start : start + each.whole]
                    start += each.whole
                elif index == part:
                    whole = b
                else:
                    continue
                # A copy: a view would keep the whole matrix.
                parts[index] = (mine, whole[each.rows].to(dtype, copy=True).contiguous())
        self._check_complete(checkpoint, adapted)
        return dict(found)

    def _check_complete(
        self, checkpoint: AdapterCheckpoint, adapted: Collection[tuple[str, int | None]]
    ) -> None:
        """Raises InvalidArgument if the adapter targets a layer of this rank and has no matrices of it."""
        if checkpoint.targets is None:
            return
        targets = checkpoint.targets.with_names(self._names_here)
        last_names = {path.rpartition(".")[2] for path in checkpoint.matrices}
        for path in (*self._places, *self._unadapted):
            layer, part = self._places.get(path, (path, None))
            if (layer, part) in adapted or (layer, None) in adapted:
                continue
            # vLLM fuses layers that the original model may have as parts only. The adapter shows which it is.
            if path in self._fused and path.rpartition(".")[2] not in last_names:
                continue
            if targets.include(path):
                raise InvalidArgument(
                    f"adapter {checkpoint.name} is incomplete: it targets {path}, but its file has no matrices of"
                    " that layer; save it again",
                    param="source",
                )

    def _place(self, path: str, name: str) -> tuple[str, int | None] | None:
        """Returns the layer and the part of a checkpoint's path; `None` if it is on another stage."""
        place, mapped = self._places.get(path), ""
        if place is None:
            mapped = self._map(path)
            place = self._places.get(mapped)
        if place is not None:
            return place
        if path.startswith(tuple(self._elsewhere)) or mapped.startswith(tuple(self._elsewhere)):
            return None
        last = path.rpartition(".")[2]
        if last in ("embed_tokens", "wte", "lm_head", "embed_out"):
            why = "embeddings and output heads take no adapters; train it without that layer"
        elif ".experts" in path:
            why = "expert layers take no adapters; train it without them"
        elif last in _READ_DIRECTLY:
            why = "latent attention takes no adapter there; train it without that layer"
        elif (layer := self._unadapted.get(path)) is not None:
            what = "this layer" if layer == path else f"{layer}, of which it is a part,"
            why = f"{what} takes no adapters; train it without that layer"
        else:
            why = f"{self._architecture} has no such layer; is it for another base model?"
        raise InvalidArgument(f"adapter {name} adapts {path}, but {why}", param="source")

    def _map(self, path: str) -> str:
        """Returns the path in this model of a checkpoint's layer; empty if the model drops the layer."""
        if self._mapper is None:
            return path
        mapped: str | None = self._mapper.map_name(f"{path}.weight")
        return (mapped or "").removesuffix(".weight")

    def _names_here(self, name: str) -> Iterator[str]:
        """Yields the names in this model of layers that a checkpoint names by their path, or by its end."""
        if self._mapper is None:
            return
        yield self._map(name)
        yield self._map(f".{name}").removeprefix(".")
        # An end of a path may begin inside a prefix that the model maps.
        for prefix in self._mapper.orig_to_new_prefix:
            for dot in (index for index, each in enumerate(prefix[:-1], 1) if each == "."):
                if name.startswith(prefix[dot:]):
                    yield self._map(prefix[:dot] + name)

    def place(self, slot: int, matrices: Mapping[str, LayerWeights]) -> None:
        """See `lora.store.AdaptedModel`."""
        for path, stack in self._stacks.items():
            stack.write(slot, matrices.get(path) or (None,) * len(self._layers[path].parts))


def _layer_of(module: Any, name: str) -> _Layer | None:
    """Describes a linear layer that takes adapters; `None` for any other module."""
    if name in _READ_DIRECTLY:
        return None
    kind = type(module)
    if kind is RowParallelLinear:
        size = module.input_size_per_partition
        inputs = slice(module.tp_rank * size, (module.tp_rank + 1) * size)
        return _Layer(module, inputs, module.input_size, (_part(0, module.output_size),))
    if kind is QKVParallelLinear:
        parts = _attention_parts(module)
    elif kind is MergedColumnParallelLinear:
        parts = tuple(
            _part(module.tp_rank, size // module.tp_size, module.tp_size) for size in module.output_sizes
        )
    elif kind is ColumnParallelLinear:
        parts = (_part(module.tp_rank, module.output_size_per_partition, module.tp_size),)
    elif kind is ReplicatedLinear:
        parts = (_part(0, module.output_size),)
    else:
        return None
    if len(parts) > MOST_PARTS:
        return None
    return _Layer(module, slice(0, module.input_size), module.input_size, parts)


def _part(index: int, size: int, count: int = 1) -> _Part:
    return _Part(slice(index * size, (index + 1) * size), size * count)


def _attention_parts(module: Any) -> tuple[_Part, ...]:
    """Returns queries, keys and values. Ranks share key heads if there are fewer of them."""
    queries = module.num_heads * module.head_size
    shared = module.tp_rank // module.num_kv_head_replicas
    count = module.tp_size // module.num_kv_head_replicas
    return (
        _part(module.tp_rank, queries, module.tp_size),
        _part(shared, module.num_kv_heads * module.head_size, count),
        _part(shared, module.num_kv_heads * module.v_head_size, count),
    )


def _places_of(
    path: str, layer: _Layer, packed: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, int | None]]:
    """Yields the paths of a layer and of its parts in checkpoints, each with the part."""
    yield path, None
    _, *parts = _names_of(path, packed)
    if len(parts) == len(layer.parts) > 1:
        for index, part in enumerate(parts):
            yield part, index


def _names_of(path: str, packed: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns a layer's own path and those that checkpoints give to its parts."""
    parent, _, name = path.rpartition(".")
    parts = packed.get(name) or _USUAL_PARTS.get(name, ())
    return [path, *(f"{parent}.{part}" if parent else part for part in parts)]


def _check_sizes(
    name: str, path: str, layer: _Layer, part: int | None, a: torch.Tensor, b: torch.Tensor
) -> None:
    outputs = sum(each.whole for each in layer.parts) if part is None else layer.parts[part].whole
    if (a.shape[1], b.shape[0]) != (layer.whole_inputs, outputs):
        raise InvalidArgument(
            f"adapter {name} is for another base model: its {path} maps {a.shape[1]} values to {b.shape[0]},"
            f" the model's {layer.whole_inputs} to {outputs}",
            param="source",
        )
