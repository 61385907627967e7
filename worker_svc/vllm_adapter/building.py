"""Builds vLLM's layers of a model without weights: this rank's, and those of all stages without memory."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from protos.errors import ConfigurationRefused
from worker_svc.devices.base import Device
from worker_svc.ranks.layout import RankLayout
from worker_svc.vllm_adapter.configuration import configure
from worker_svc.vllm_adapter.pooling_head import project_late


def names_of_states(model: Any, model_config: Any) -> tuple[str, ...]:
    """Returns the names of the tensors between two stages, in the order of their transfer.

    Args:
        model: vLLM's.
        model_config: vLLM's.

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


def check_stages(model_config: Any, layout: RankLayout) -> None:
    """Refuses a pipeline in which a stage would have no layers."""
    layers = model_config.get_total_num_hidden_layers()
    if layout.pipeline > layers:
        raise ConfigurationRefused(
            f"--pipeline-parallel-size {layout.pipeline} is more than the model's {layers} layers;"
            " each stage needs one"
        )


def build(config: Any, device: Device, seed: int, layout: RankLayout) -> Any:
    """Builds this rank's layers on the device, without weights.

    Raises:
        ConfigurationRefused: if a stage would get no layers.
    """
    import vllm.ir
    from vllm.utils.torch_utils import set_random_seed

    from worker_svc.vllm_adapter.parallel import set_groups

    check_stages(config.model_config, layout)
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
    """Compares the checkpoint with the whole model; see `comparison.compare`. Made-up weights fit.

    Args:
        config: vLLM's, for this rank.
        arguments: of `configure`.
        layout: this rank's.
    """
    if arguments["dummy_weights"]:
        return frozenset()
    from worker_svc.vllm_adapter.comparison import Copies, compare

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

    from worker_svc.vllm_adapter.parallel import set_groups

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
    """Builds the layers of a configuration with memory of `where`."""
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
            import worker_svc.vllm_adapter.layers.cpu_moe
        if config.model_config.use_mla:
            import worker_svc.vllm_adapter.layers.mla  # noqa: F401 - registers on import, in seconds
        if "ColBERT" in config.model_config.architecture:
            project_late()
        return initialize_model(vllm_config=config)
