"""Compares a checkpoint with its configuration before the model is built, and loads it afterwards.

The comparison is a dry run: vLLM's own loaders assign the tensors of the files' headers, without data, to the
whole model, without memory, and every copy is noted. So names, fused layers, tied weights and quantized forms
need no second description. A tensor copied in part does not fit. A parameter written in part lacks a tensor.
A tensor copied nowhere is ignored, as in transformers. vLLM's loader then reads safetensors alone, shard by
shard, with progress.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import _TYPES as _DTYPES
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, MergedColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.utils import AutoWeightsLoader

from protos.errors import ConfigurationRefused
from protos.service.logs import get_logger
from worker_svc.model_files.checkpoint import Checkpoint, reading
from worker_svc.quantized.stored_tensors import Mxfp4Experts, StoredLayers
from worker_svc.vllm_adapter.configuration import is_text_model, text_weight

# Names in one error or log line.
_MOST_NAMED = 10
# Each unknown tensor that ends a model's own loading loop costs another dry run.
_MOST_UNKNOWN = 100
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# The number in the name of an expert's tensor.
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
# Tensors of a layer that say nothing of its weights: states, and scales of activations and caches.
_HARMLESS = re.compile(r"\.(?:_extra_state|[kv]_scale|(?:in|out)put_scale)$")
_Region = tuple[int, tuple[int, ...], tuple[int, ...]]


@dataclass
class _Source:
    """A stored tensor in the dry run."""

    name: str
    """In the file."""
    shape: tuple[int, ...]
    """In the file."""
    tensor: torch.Tensor
    """As loaded."""
    read: dict[_Region, int] = field(default_factory=dict)
    """Copied regions with their numbers of elements."""
    targets: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By identity of the copies' targets, the shapes that were written."""
    unlike: torch.dtype | None = None
    """Type of a parameter that its numbers cannot become."""
    is_derived: bool = False
    """Whether another tensor was computed from it, so that its copies say nothing of its shape."""


class Copies(TorchDispatchMode):
    """Notes which regions of stored tensors are copied, and which regions of parameters are written."""

    def __init__(self, *, fills: bool = True) -> None:
        """Notes nothing yet; ``fills`` says whether filled regions count as written, such as padding."""
        super().__init__()
        self._fills = fills
        self.sources: dict[int, _Source] = {}
        self.written: dict[int, dict[_Region, int]] = {}
        # A freed tensor's identity could be given to another one.
        self._kept: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, _: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs the operator and notes it."""
        # vLLM's models of transformers have some parameters with memory.
        is_loaded = func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta
        result = args[0] if is_loaded else func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self._write(args[0])
            source = self.sources.get(_identity(args[1]))
            if source is not None:
                source.read[_region(args[1])] = args[1].numel()
                source.targets[_identity(args[0])] = tuple(args[0].shape)
                if not _can_become(source.tensor.dtype, args[0].dtype):
                    source.unlike = args[0].dtype
        elif func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            if self._fills:
                self._write(args[0])
        elif isinstance(result, torch.Tensor):
            self._derive(args, result)
        return result

    def _write(self, target: torch.Tensor) -> None:
        self.written.setdefault(_identity(target), {})[_region(target)] = target.numel()

    def _derive(self, args: Sequence[Any], result: torch.Tensor) -> None:
        """Follows a stored tensor through conversions; marks it if more than its type or order changes."""
        if _identity(result) in self.sources:
            return
        flat = [each for arg in args for each in (arg if isinstance(arg, list | tuple) else (arg,))]
        given = [
            source
            for each in flat
            if isinstance(each, torch.Tensor) and (source := self.sources.get(_identity(each))) is not None
        ]
        for source in given:
            if len(given) == 1 and result.numel() == source.tensor.numel():
                self.sources[_identity(result)] = source
                self._kept.append(result)
            else:
                source.is_derived = True


def _can_become(stored: torch.dtype, loaded: torch.dtype) -> bool:
    """Whether numbers of a type mean the same in another; those of 8 bits need scales."""
    return stored == loaded or (loaded.is_floating_point and stored in _FLOATS)


def _identity(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - torch has no public name for a storage


def _region(tensor: torch.Tensor) -> _Region:
    return int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())


def compare(config: Any, model: torch.nn.Module, building: Copies) -> frozenset[str]:
    """Compares the files of a model with its layers; returns the names of ignored tensors.

    `model` is the whole model on the meta device, and `building` has the copies of its constructor, which
    reads poolers' weights from other folders.

    Raises:
        ConfigurationRefused: names a tensor that is missing, of another shape, or of a surplus layer.
    """
    checkpoint = Checkpoint.open(Path(config.model_config.model))
    unknown: dict[str, None] = {}
    while True:
        form = StoredForm(config)
        run = _DryRun(model, checkpoint, form, unknown)
        with set_current_vllm_config(config), run.tolerating_unknown(), run.copies:
            again = run.load()
        if not again or len(unknown) > _MOST_UNKNOWN:
            break
    run.copies.written |= {
        key: value for key, value in building.written.items() if key not in run.copies.written
    }
    form.experts.check_pairs()
    ignored = _judge(run, model, checkpoint, config)
    form.layers.finish()
    return ignored


class _DryRun:
    """Loads a checkpoint's tensors without data into a model without memory."""

    def __init__(
        self, model: torch.nn.Module, checkpoint: Checkpoint, form: "StoredForm", unknown: dict[str, None]
    ) -> None:
        self.copies = Copies()
        self.unknown = unknown
        """Names of tensors and modules outside the model's layers."""
        self.consumed: set[str] = set()
        """Names of stored tensors of which nothing is loaded by itself."""
        self.failed: list[tuple[torch.Tensor, tuple[int, ...] | None]] = []
        self._model = model
        self._checkpoint = checkpoint
        self.form = form
        self._current = ""
        for name, parameter in model.named_parameters():
            self._watch(name, parameter)

    def load(self) -> bool:
        """Loads all tensors; True if an unknown tensor ended the run. The next run omits it."""
        try:
            self._model.load_weights(self._tensors())  # type: ignore[operator]
        except KeyError as error:
            name = str(error.args[0]) if error.args else ""
            if name.rpartition(".")[2] != self._current.rpartition(".")[2] or self._current in self.unknown:
                raise ConfigurationRefused(
                    f"vLLM cannot load {type(self._model).__name__}: its loader does not find {name};"
                    " choose another model"
                ) from error
            self._refuse_layer(name)
            self.unknown[self._current] = None
            return True
        except (AssertionError, AttributeError, RuntimeError, ValueError, IndexError) as error:
            raise self._misfit(error) from error
        return False

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for shard in self._checkpoint.shards:
            with reading(shard.path) as file:
                for name, header in shard.tensors.items():
                    if _HARMLESS.search(name):
                        continue
                    kind = _DTYPES.get(header.kind, torch.uint8)
                    stored = (
                        file.get_tensor(name)
                        if self.form.layers.has_values(name)
                        else torch.empty(header.shape, dtype=kind, device="meta")
                    )
                    taken = self.form.take(name, stored)
                    if taken is None:
                        self.consumed.add(name)
                        continue
                    if taken[0] in self.unknown:
                        continue
                    self._current, tensor = taken
                    self.copies.sources[_identity(tensor)] = _Source(name, header.shape, tensor)
                    yield self._current, tensor

    def _watch(self, name: str, parameter: Any) -> None:
        """Lets a parameter's loader report the tensor that it refuses."""
        loader = getattr(parameter, "weight_loader", default_weight_loader)
        if hasattr(loader, "watched"):
            loader = loader.watched

        def load(*args: Any, **kwargs: Any) -> Any:
            try:
                return loader(*args, **kwargs)
            except (AssertionError, RuntimeError, ValueError, IndexError):
                given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
                shard = kwargs.get("loaded_shard_id", args[2] if len(args) == 3 else None)
                self.failed.append((given[-1], _expected(self._model, name, parameter, shard)))
                raise

        load.watched = loader  # type: ignore[attr-defined]
        parameter.weight_loader = load

    def _misfit(self, error: Exception) -> ConfigurationRefused:
        """Returns the refusal of the tensor that a loader did not take."""
        if self.failed:
            tensor, expected = self.failed[0]
            source = self.copies.sources.get(_identity(tensor))
        else:
            tensor, expected, source = None, None, next(reversed(self.copies.sources.values()), None)
        if isinstance(error, ValueError | AttributeError) and tensor is None:
            return ConfigurationRefused(
                f"tensor {self._current} has no place in the model of config.json;"
                " use the config.json that belongs to the weights"
            )
        if source is None:
            return ConfigurationRefused(f"tensor {self._current} does not fit config.json: {error}")
        return _wrong_shape(source, expected, self.form)

    @contextlib.contextmanager
    def tolerating_unknown(self) -> Iterator[None]:
        """Lets vLLM's loaders pass tensors outside layers with weights."""
        known = AutoWeightsLoader._can_ignore_unexpected  # noqa: SLF001 - vLLM has no setting for it

        def can_ignore(loader: AutoWeightsLoader, name: str) -> bool:
            if known(loader, name):
                return True
            parent, _, part = name.removesuffix(".").rpartition(".")
            if _has_weights(loader.module, parent):
                return False
            if part.isdigit():
                raise _surplus(self._current)
            parts = self._current.split(".")
            end = parts.index(part) + 1 if part in parts else len(parts)
            self.unknown[".".join(parts[:end])] = None
            return True

        AutoWeightsLoader._can_ignore_unexpected = can_ignore  # noqa: SLF001
        try:
            yield
        finally:
            AutoWeightsLoader._can_ignore_unexpected = known  # noqa: SLF001

    def _refuse_layer(self, name: str) -> None:
        """Refuses a tensor of a surplus layer in a list of the model's layers."""
        parts = name.split(".")
        for place, part in enumerate(parts):
            if part.isdigit():
                try:
                    layers = self._model.get_submodule(".".join(parts[:place]))
                except AttributeError:
                    return
                if not hasattr(layers, part):
                    raise _surplus(name)


def _judge(run: _DryRun, model: torch.nn.Module, checkpoint: Checkpoint, config: Any) -> frozenset[str]:
    sources = {source.name: source for source in run.copies.sources.values()}
    linear = {
        _identity(parameter)
        for module in model.modules()
        if isinstance(module, LinearBase)
        for parameter in module.parameters(recurse=False)
    }
    for source in sources.values():
        if source.unlike is not None:
            described = "floating-point numbers" if source.unlike.is_floating_point else "other numbers"
            raise ConfigurationRefused(
                f"tensor {source.name} holds {str(source.tensor.dtype).removeprefix('torch.')}, but config.json describes"
                f" {described}; use the config.json that belongs to the weights"
            )
        is_plain = source.name.endswith(".weight") and linear & source.targets.keys()
        if is_plain and (scheme := run.form.layers.missing_scheme(source.name)):
            raise ConfigurationRefused(
                f"tensor {source.name} is not quantized, but quantization_config describes {scheme};"
                " use the config.json that belongs to the weights"
            )
        copied = sum(source.read.values())
        if source.read and not source.is_derived and copied < source.tensor.numel():
            expected = next(iter(source.targets.values())) if len(source.read) == 1 else None
            raise _wrong_shape(source, expected, run.form)
    stored = {name for shard in checkpoint.shards for name in shard.tensors}
    used = {source.name for source in sources.values() if source.read or source.is_derived}
    ignored = frozenset(stored - used - run.consumed)
    _refuse_parts_of_layers(ignored, used, checkpoint)
    missing: list[str] = []
    for name, parameter in model.named_parameters():
        identity = _identity(parameter)
        if sum(run.copies.written.get(identity, {}).values()) < parameter.numel():
            writers = [source for source in sources.values() if identity in source.targets]
            experts = _absent_experts(writers, parameter.shape[0])
            if writers and not experts and _EXPERT.search(writers[0].name):
                smallest = min(writers, key=lambda each: each.tensor.numel())
                raise _wrong_shape(smallest, None, run.form)
            missing += experts or _absent(model, run.form.layers.stored_name(name), stored - ignored)
    missing += _absent_head_bias(config, model, stored)
    if missing:
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        other = f", but unknown {', '.join(list(run.unknown)[:_MOST_NAMED])}" if run.unknown else ""
        raise ConfigurationRefused(
            f"the weights lack {', '.join(missing[:_MOST_NAMED])}{more}{other};"
            " fetch the checkpoint again, or use the config.json that belongs to it"
        )
    return ignored


def _refuse_parts_of_layers(ignored: frozenset[str], used: set[str], checkpoint: Checkpoint) -> None:
    """Refuses ignored tensors that would change the numbers of a layer. Some tools write biases of zeros."""
    layers = {name.rpartition(".")[0] for name in used}
    for shard in checkpoint.shards:
        for name in sorted(ignored & shard.tensors.keys()):
            layer, _, kind = name.rpartition(".")
            if layer not in layers or _HARMLESS.search(name):
                continue
            if kind != "bias" or shard.read(name).any():
                raise ConfigurationRefused(
                    f"tensor {name} has no place in the model of config.json;"
                    " use the config.json that belongs to the weights"
                )


def _absent_head_bias(config: Any, model: torch.nn.Module, stored: set[str]) -> list[str]:
    """Returns the name of a missing bias of the output head.

    vLLM's models of transformers have such a bias only if the files do.
    """
    name = "lm_head.bias"
    if name in stored or not hasattr(model, "lm_head") or "Transformers" not in type(model).__name__:
        return []
    from transformers import AutoModelForCausalLM

    with set_current_vllm_config(config), torch.device("meta"):
        own: Any = AutoModelForCausalLM.from_config(
            config.model_config.hf_config, trust_remote_code=config.model_config.trust_remote_code
        )
    return [name] if getattr(own.get_output_embeddings(), "bias", None) is not None else []


def _absent_experts(writers: Sequence[_Source], experts: int) -> list[str]:
    found: dict[tuple[str, str], set[int]] = {}
    for source in writers:
        if match := _EXPERT.search(source.name):
            around = source.name[: match.start(1)], source.name[match.end(1) :]
            found.setdefault(around, set()).add(int(match[1]))
    return [
        f"{before}{expert}{after}"
        for (before, after), numbers in found.items()
        for expert in range(experts)
        if expert not in numbers
    ]


def _absent(model: torch.nn.Module, name: str, stored: set[str]) -> list[str]:
    """Returns the tensors that a parameter lacks, by the names of the checkpoint where vLLM fuses several."""
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", None) or {}
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part in packed and len(packed[part]) > 1:
            each = [".".join([*parts[:place], own, *parts[place + 1 :]]) for own in packed[part]]
            return [one for one in each if not _is_stored(one, stored)] or [name]
    return [name]


def _is_stored(name: str, stored: set[str]) -> bool:
    """Whether a file contains a tensor of this name, with or without the model's first component."""
    return name in stored or name.partition(".")[2] in stored


def _expected(
    model: torch.nn.Module, name: str, parameter: torch.Tensor, shard: Any
) -> tuple[int, ...] | None:
    """Returns the shape that a parameter's loader takes for a shard of it."""
    module = model.get_submodule(name.rpartition(".")[0])
    shape = tuple(parameter.shape)
    if isinstance(module, VocabParallelEmbedding):
        return (module.org_vocab_size, *shape[1:])
    if isinstance(module, QKVParallelLinear) and shard in ("q", "k", "v"):
        heads = module.total_num_heads if shard == "q" else module.total_num_kv_heads
        size = module.v_head_size if shard == "v" else module.head_size
        return (heads * size, *shape[1:])
    if isinstance(module, MergedColumnParallelLinear) and isinstance(shard, int):
        return (module.output_sizes[shard], *shape[1:])
    return shape if math.prod(shape) else None


def _wrong_shape(source: _Source, loaded: tuple[int, ...] | None, form: "StoredForm") -> ConfigurationRefused:
    expected = form.layers.stored_shape(source.name, loaded) if loaded else source.shape
    described = f"but config.json describes {list(expected)}" if expected != source.shape else ""
    return ConfigurationRefused(
        f"tensor {source.name} is {list(source.shape)} in the file, {described or 'which does not fit config.json'};"
        " use the config.json that belongs to the weights"
    )


def _surplus(name: str) -> ConfigurationRefused:
    return ConfigurationRefused(
        f"the weights have layers that config.json does not describe, the first one {name};"
        " use the config.json that belongs to the weights"
    )


def _has_weights(model: torch.nn.Module, name: str) -> bool:
    """Whether a module owns weights or fused layers.

    An unknown tensor there belongs to another form of the layer, for example a quantized form.
    """
    try:
        module = model.get_submodule(name)
    except AttributeError:  # a weight
        return True
    fused = any(hasattr(child, "output_sizes") for child in module.children())
    return fused or any(True for _ in module.parameters(recurse=False))


ShardProgress = Callable[[int, int, str], None]
"""Called with the number of shards read, the total, and the name of the next file."""


class StoredForm:
    """From the tensors of a checkpoint to those that vLLM's loaders take: names and quantized forms."""

    def __init__(self, config: Any) -> None:
        model_config = config.model_config
        quantization = getattr(config.quant_config, "quantization", None)
        self._rename = text_weight if is_text_model(model_config) else str
        self.layers = StoredLayers(quantization)
        """Their quantized forms."""
        self.experts = Mxfp4Experts(model_config.dtype)
        self._take = self.layers.take if quantization else self.experts.take

    def take(self, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """Returns a tensor's name and value for vLLM; `None` if nothing is left of it."""
        if self._rename(name) is None:
            return None
        common = self._take(name, tensor)
        if common is None or (renamed := self._rename(common[0])) is None:
            return None
        return renamed, common[1]


class ShardLoader(DefaultModelLoader):
    """Reads a model's weights, which `comparison` has compared with the model."""

    def __init__(self, config: Any, progress: ShardProgress, ignored: frozenset[str]) -> None:
        super().__init__(config.load_config)
        self._config = config
        self._progress = progress
        self._ignored = ignored

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Assigns the weights; names ignored files and tensors in a log line."""
        super().load_weights(model, model_config)
        files = Checkpoint.open(Path(model_config.model)).ignored
        if files or self._ignored:
            get_logger().warning(
                "extra_weights_ignored", files=list(files), tensors=sorted(self._ignored)[:_MOST_NAMED],
                num_tensors=len(self._ignored),
            )  # fmt: skip

    def get_all_weights(
        self, model_config: Any, model: torch.nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the names and tensors of all files; of a multimodal checkpoint, those of its text model."""
        if getattr(model, "secondary_weights", ()):
            raise ConfigurationRefused(
                f"{model_config.model} keeps weights outside its folder, which is not served;"
                " choose another model"
            )
        form = StoredForm(self._config)
        shards = Checkpoint.open(Path(model_config.model)).shards
        for done, shard in enumerate(shards):
            self._progress(done, len(shards), shard.path.name)
            with reading(shard.path) as file:
                for name in shard.tensors:
                    if name in self._ignored or form.layers.has_values(name):
                        continue
                    taken = form.take(name, file.get_tensor(name))
                    if taken is not None:
                        yield taken
        self._progress(len(shards), len(shards), "done")
