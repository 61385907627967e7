"""Builds vLLM's layers of a model without weights, and describes them.

A rank's layers have memory, those of all stages have none. vLLM's parallel groups have no connections here:
their collectives are the operators of `ranks`.
"""

import contextlib
import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from protos.errors import ConfigurationRefused
from worker_svc.devices.base import Device
from worker_svc.ranks import operators
from worker_svc.ranks.layout import RankLayout
from worker_svc.shapes import AttentionLayer, ModelDescription, ModelSize, PoolingDescription
from worker_svc.vllm_adapter.configuration import configure
from worker_svc.vllm_adapter.pooling_head import project_late
from worker_svc.vllm_settings import recommended

_MATRIX = 2  # dimensions


def names_of_states(model: Any, model_config: Any) -> tuple[str, ...]:
    """Returns the names of the tensors between two stages of vLLM's model, in the order of their transfer.

    Raises:
        ConfigurationRefused: A tensor is not [tokens, hidden]. They travel stacked.
    """
    tokens, hidden = 1, model_config.get_hidden_size()
    empty = model.make_empty_intermediate_tensors(tokens, model_config.dtype, torch.device("meta"))
    for name, state in empty.tensors.items():
        if tuple(state.shape) != (tokens, hidden):
            shape = ", ".join(map(str, ("tokens", *state.shape[1:])))
            raise ConfigurationRefused(
                f"{model_config.architecture} passes {name} [{shape}] from stage to stage, but only"
                f" [tokens, {hidden}] is served; use --tensor-parallel-size instead of --pipeline-parallel-size"
            )
    return tuple(sorted(empty.tensors))


def build(config: Any, device: Device, seed: int, layout: RankLayout) -> Any:
    """Builds this rank's layers on the device, without weights; refuses a stage without layers."""
    import vllm.ir
    from vllm.utils.torch_utils import set_random_seed

    layers = config.model_config.get_total_num_hidden_layers()
    if layout.pipeline > layers:
        raise ConfigurationRefused(
            f"--pipeline-parallel-size {layout.pipeline} is more than the model's {layers} layers;"
            " each stage needs one"
        )
    set_groups(layout)
    set_random_seed(seed)
    # Call vLLM's own operators directly: without a compiler, dispatching them through torch is only overhead.
    vllm.ir.set_default_torch_wrap(False)
    config.kernel_config.ir_op_priority.set_default()
    model = _initialize(config, device, device.torch_device)
    if device.spec.has_vllm_kernels:
        from worker_svc.vllm_adapter.layers.cpu_layers import use_own_layer_norms

        use_own_layer_norms(model)
    return model


def compare_weights(config: Any, arguments: Mapping[str, Any], layout: RankLayout) -> frozenset[str]:
    """Compares the checkpoint with the whole model; see `weights.compare`. Made-up weights fit.

    `config` is vLLM's for this rank, and `arguments` are those of `configure`.
    """
    if arguments["dummy_weights"]:
        return frozenset()
    from worker_svc.vllm_adapter.weights import Copies, compare

    whole = config if layout.world_size == 1 else configure(**arguments, layout=RankLayout())
    building = Copies(fills=False)
    with _without_memory(RankLayout(), then=layout) as nowhere:
        with building:
            model = _initialize(whole, arguments["device"], nowhere)
        ignored = compare(whole, model, building)
    # Layers register here by name, and would meet themselves when they are built.
    whole.compilation_config.static_forward_context.clear()
    whole.compilation_config.static_all_moe_layers.clear()
    return ignored


def layers_of_all_stages(arguments: Mapping[str, Any], layout: RankLayout) -> dict[str, Any]:
    """Returns the layers of a model's every stage by name, without memory.

    All ranks must number the KV groups alike, although each has only some of the layers.
    """
    # Where experts are does not matter here, and vLLM cannot lay them out without memory.
    one_stage = RankLayout(layout.tensor_rank, layout.tensor)
    config = configure(**arguments, layout=one_stage)
    with _without_memory(one_stage, then=layout) as nowhere:
        _initialize(config, arguments["device"], nowhere)
    layers: dict[str, Any] = config.compilation_config.static_forward_context
    return layers


class _Valueless(TorchFunctionMode):
    """Gives tensors without memory zeros where a model's constructor reads values, such as ALiBi's slopes."""

    def __torch_function__(
        self, func: Any, _: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Reads zeros instead of missing values."""
        if func in (torch.Tensor.tolist, torch.Tensor.item) and args[0].is_meta:
            args = (torch.zeros_like(args[0], device="cpu"), *args[1:])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _without_memory(layout: RankLayout, *, then: RankLayout) -> Iterator[torch.device]:
    """Lets the block build a layout on the device that it gets; afterwards vLLM knows the layout `then`."""
    from vllm.model_executor.layers import rotary_embedding

    set_groups(layout)
    # Models share rotary embeddings, and the next model needs them with data.
    shared = rotary_embedding._ROPE_DICT  # noqa: SLF001 - vLLM has no other way
    before = dict(shared)
    try:
        with _Valueless():
            yield torch.device("meta")
    finally:
        shared.clear()
        shared.update(before)
        set_groups(then)


def _initialize(config: Any, device: Device, where: torch.device) -> Any:
    if "Splade" in config.model_config.architecture:
        raise ConfigurationRefused(
            f"{Path(config.model_config.model).name} ({config.model_config.architecture}) makes sparse vectors (SPLADE),"
            " which are not served; choose another model"
        )
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype), where:
        if config.model_config.is_moe and device.spec.has_vllm_kernels:
            from worker_svc.vllm_adapter.layers.moe import replace_experts

            replace_experts(has_kernels=True)
        if config.model_config.use_mla:
            import worker_svc.vllm_adapter.layers.mla  # noqa: F401 - registers on import, in seconds
        if "ColBERT" in config.model_config.architecture:
            project_late()
        return initialize_model(vllm_config=config)


class Coordinator:
    """The part of vLLM's `GroupCoordinator` that layers use: sizes and places first, collectives later.

    A model is built before its ranks meet, so a group owns no connections.
    """

    device_communicator = None

    def __init__(self, name: str, ranks: tuple[int, ...], rank: int, *, reduces: bool = False) -> None:
        """Describes a group of `ranks` of a replica, as this `rank` sees it.

        `reduces` says whether layers may call its collectives; the operators serve the ranks of a stage.
        """
        self.unique_name = f"{name}:0"
        self.ranks = list(ranks)
        self.rank = rank
        self.world_size = len(ranks)
        self.rank_in_group = ranks.index(rank)
        self.local_rank = 0
        members = SimpleNamespace(size=lambda: self.world_size, rank=lambda: self.rank_in_group)
        self.cpu_group = self.device_group = members
        self._reduces = reduces

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank is the group's first."""
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        """Whether this rank is the group's last."""
        return self.rank_in_group == self.world_size - 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Adds a tensor up over the group, in place."""
        if self.world_size == 1:
            return tensor
        self._check()
        return operators.all_reduce_(tensor)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Joins the tensors of all ranks along a dimension."""
        if self.world_size == 1:
            return tensor
        self._check()
        return operators.all_gather(tensor, self.world_size, dim)

    def _check(self) -> None:
        if not self._reduces:
            raise NotImplementedError(f"vLLM's group {self.unique_name} has no collectives here")

    def destroy(self) -> None:
        """Does nothing: there is nothing to close."""


def set_groups(layout: RankLayout) -> None:
    """Tells vLLM which part of a model this rank has. Later calls replace the groups."""
    from vllm.distributed import parallel_state

    rank = layout.rank
    alone = (rank,)
    stages = tuple(range(layout.tensor_rank, layout.world_size, layout.tensor))
    tensor = Coordinator("tp", layout.peers, rank, reduces=True)
    groups: dict[str, Any] = {
        "_WORLD": Coordinator("world", tuple(range(layout.world_size)), rank),
        "_TP": tensor,
        "_ETP": tensor,
        "_PP": Coordinator("pp", stages, rank),
        "_DP": Coordinator("dp", alone, rank),
        "_EP": Coordinator("ep", layout.peers, rank, reduces=True),
        "_PCP": Coordinator("pcp", alone, rank),
        "_DCP": Coordinator("dcp", alone, rank),
    }
    for name, group in groups.items():
        setattr(parallel_state, name, group)


def is_experts(layer: Any) -> bool:
    """Whether a layer of vLLM is an expert layer, which caches nothing."""
    # Importing that module takes seconds. A model without expert layers has not imported it.
    module = sys.modules.get("vllm.model_executor.layers.fused_moe.runner.moe_runner_interface")
    return module is not None and isinstance(layer, module.MoERunnerInterface)


def describe(
    config: Any, layers: Mapping[str, Any], pooling: PoolingDescription | None, *, here: Mapping[str, Any]
) -> ModelDescription:
    """Describes a model by vLLM's configuration and layers; refuses layers that are not served.

    `layers` are those of all stages by name, and `here` those of this rank.
    """
    model_config = config.model_config
    attention = []
    for name, layer in layers.items():
        if is_experts(layer):
            continue
        if not hasattr(layer, "kv_cache_torch_dtype"):
            raise ConfigurationRefused(
                f"layers like {name} ({type(layer).__name__}) are not served yet; choose another model"
            )
        attention.append(
            AttentionLayer(
                name=name,
                num_heads=layer.num_heads,
                num_kv_heads=layer.num_kv_heads,
                head_size=layer.head_size,
                window=layer.sliding_window or 0,
                dtype=layer.kv_cache_torch_dtype,
                shares_with=layer.kv_sharing_target_layer_name,
                here=name in here,
                latent=layer.impl.params.latent > 0,
                alibi=bool(layer.impl.params.slopes),
            )
        )
    _check_shared_caches(model_config.architecture, attention)
    text = model_config.hf_text_config
    generation = model_config.try_get_generation_config()
    eos: set[int] = set()
    for value in (generation.get("eos_token_id"), getattr(text, "eos_token_id", None)):
        eos.update([value] if isinstance(value, int) else value or ())
    return ModelDescription(
        architecture=model_config.architecture,
        vocab_size=text.vocab_size,
        # Layers that attend within chunks (Llama 4) are full attention in the first chunk.
        max_model_len=min(model_config.max_model_len, *_chunk_lengths(layers)),
        eos_token_ids=tuple(sorted(eos)),
        dtype=model_config.dtype,
        quantization=None if config.quant_config is None else str(config.quant_config.get_name()),
        layers=tuple(attention),
        pooling=pooling,
        default_sampling=recommended(generation),
    )


def _chunk_lengths(layers: Mapping[str, Any]) -> list[int]:
    """Returns the lengths of the layers' attention chunks, and a length above every model's."""
    chunks = [getattr(layer, "attention_chunk_size", 0) for layer in layers.values()]
    return [sys.maxsize, *(chunk for chunk in chunks if chunk)]


def _check_shared_caches(architecture: str, layers: Sequence[AttentionLayer]) -> None:
    """Refuses layers that share the KV cache of a layer in another stage."""
    here = {layer.name: layer.here for layer in layers}
    for layer in layers:
        owner = layer.shares_with
        if owner is not None and here[owner] != layer.here:
            raise ConfigurationRefused(
                f"{architecture} has layers that share a KV cache across stages ({layer.name} uses {owner}'s);"
                " use --tensor-parallel-size instead of --pipeline-parallel-size"
            )


def measure(model_config: Any, model: torch.nn.Module, vocab_size: int) -> ModelSize:
    """Measures the sizes for the model's memory; `vocab_size` is 0 for a model without logits."""
    # Loading brings quantized weights into the device's form, whose size the layer knows.
    quantized: list[Any] = [module for module in model.modules() if hasattr(module, "quantized_bytes")]
    replaced = {id(each) for module in quantized for each in (module.weight_packed, module.weight_scale)}
    tensors = [
        each for each in itertools.chain(model.parameters(), model.buffers()) if id(each) not in replaced
    ]
    storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    widths: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        layer = re.search(r"\.(\d+)\.", name)
        if layer is None or parameter.dim() < _MATRIX or name.endswith(".weight_scale"):
            continue
        experts = parameter.shape[:-_MATRIX].numel()
        inputs = parameter.shape[-1] * getattr(parameter, "packed_factor", 1)
        widths[layer[1]] = widths.get(layer[1], 0) + experts * (parameter.shape[-_MATRIX] + inputs)
    return ModelSize(
        weight_bytes=sum(storage.nbytes() for storage in storages.values())
        + sum(module.quantized_bytes for module in quantized),
        width=max(widths.values(), default=0),
        hidden_size=model_config.get_hidden_size(),
        vocab_size=vocab_size,
        itemsize=model_config.dtype.itemsize,
    )
