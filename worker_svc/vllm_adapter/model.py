"""A model of vLLM: its layers run here, without vLLM's engine."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from protos.errors import ConfigurationRefused
from worker_svc.devices.base import Device
from worker_svc.graphs.capture import Recorder, Recording
from worker_svc.lora.checkpoint import LoraLimits
from worker_svc.pooling import pool_packed, pool_rows
from worker_svc.ranks.layout import RankLayout
from worker_svc.shapes import (
    AttentionLayer,
    ModelDescription,
    ModelSize,
    PoolingDescription,
    PoolingTask,
)
from worker_svc.vllm_adapter.building import (
    build,
    compare_weights,
    describe,
    is_experts,
    layers_of_all_stages,
    measure,
    names_of_states,
)
from worker_svc.vllm_adapter.configuration import Dtype, configure, refusal_on_error
from worker_svc.vllm_adapter.pooling_head import PoolingHead, describe_pooling

if TYPE_CHECKING:
    from worker_svc.vllm_adapter.layers.lora import AdaptedLayers


# Packed texts have a third number: where they start.
_PACKED_PLACES = 3


class VllmModel:
    """A rank's part of a model on a device, in this process.

    It is built without weights, so a worker can describe the model at once; `load_weights` reads them.
    """

    description: ModelDescription
    """The model's facts."""
    size: ModelSize
    """Sizes for the model's memory."""
    adapted: "AdaptedLayers | None"
    """The layers that take LoRA adapters; `None` if the model runs alone."""

    _pooling_head: PoolingHead | None

    def __init__(
        self,
        folder: Path,
        device: Device,
        *,
        dtype: Dtype,
        seed: int,
        dummy_weights: bool = False,
        trust_remote_code: bool = False,
        language_model_only: bool = False,
        compiled: bool = True,
        layout: RankLayout | None = None,
        pooling_task: PoolingTask | None = None,
        lora: LoraLimits | None = None,
    ) -> None:
        """Reads the configuration and builds the layers with uninitialized weights.

        Args:
            folder: a Hugging Face folder.
            device: where the weights go.
            dtype: type of weights and activations; "auto" takes the configuration's.
            seed: of the random generators of torch, numpy and Python.
            dummy_weights: whether to generate random weights instead of reading safetensors files.
            trust_remote_code: whether Python code in the folder may run.
            language_model_only: whether to omit the parts of a multimodal model for inputs other than text.
            compiled: whether a device with its own compiler may use it; otherwise the model's own code runs.
            layout: this rank's part of the model; `None` for all of it.
            pooling_task: the result of a pooling model; `None` for the model's usual task.
            lora: makes the layers take LoRA adapters; `None` for the model alone.
        """
        from vllm.forward_context import create_forward_context

        self._device = device
        self._layout = layout = layout or RankLayout()
        arguments: dict[str, Any] = {
            "folder": folder, "device": device, "dtype": dtype, "dummy_weights": dummy_weights, "seed": seed,
            "trust_remote_code": trust_remote_code, "language_model_only": language_model_only,
        }  # fmt: skip
        with refusal_on_error(self._refusal(folder)):
            self._config: Any = configure(**arguments, layout=layout)
            self._ignored = compare_weights(self._config, arguments, layout)
            self._model: Any = build(self._config, device, seed, layout)
        self._layers: dict[str, Any] = self._config.compilation_config.static_forward_context
        self._pooling = self._prepare_pooling(pooling_task)
        self._prepare_layers(cached=self._pooling is None)
        self._whole: Callable[..., torch.Tensor] = self._step()
        self._run, self._head = self._whole, self._compute_logits
        if compiled:
            self._run, self._head = device.compile(self._run), device.compile(self._head, by_shape=True)
        self._caches: Mapping[str, torch.Tensor] = {}
        self.description = self._describe(arguments)
        self._state_names = self._names_of_states()
        # Measured before load_weights(), which packs matrices into other shapes.
        vocab_size = 0 if self._pooling else self.description.vocab_size
        self.size = measure(self._config.model_config, self._model, vocab_size)
        self._adapt(lora, compiled=compiled)
        # All steps use one context and only replace its metadata.
        self._context: Any = create_forward_context({}, self._config)

    def _prepare_pooling(self, task: PoolingTask | None) -> PoolingDescription | None:
        self._pooling_head = None
        if self._config.model_config.runner_type != "pooling":
            if task is not None:
                raise ConfigurationRefused(
                    f"{self._config.model_config.architecture} generates text; omit --pooling-task {task}"
                )
            return None
        if self._layout.world_size > 1:
            raise ConfigurationRefused("pooling models run on one rank; use --workers for more of them")
        pooling, self._pooling_head = describe_pooling(self._config, self._model, self._layers, task)
        return pooling

    def _refusal(self, folder: Path) -> str:
        stages = f" in {self._layout.pipeline} stages" if self._layout.pipeline > 1 else ""
        return f"cannot serve {folder}{stages}"

    def _describe(self, arguments: Mapping[str, Any]) -> ModelDescription:
        """Describes the model with its cached layers on all stages."""
        everywhere: Mapping[str, Any] = {} if self._pooling else self._layers
        if self._layout.pipeline > 1 and not self._pooling:
            with refusal_on_error(self._refusal(arguments["folder"])):
                everywhere = layers_of_all_stages(arguments, self._layout)
        return describe(self._config, everywhere, self._pooling, here=self._layers)

    def _adapt(self, lora: LoraLimits | None, *, compiled: bool) -> None:
        """Prepares the steps and the layers for LoRA adapters, if the model is to take them."""
        self.adapted = None
        if lora is None:
            return
        if self._pooling is not None:
            raise ConfigurationRefused("--enable-lora needs a model that generates tokens; omit it")
        from worker_svc.vllm_adapter.layers.lora import AdaptedLayers

        facts = self.description
        self.adapted = layers = AdaptedLayers(
            self._model, lora, self._device, architecture=facts.architecture, dtype=facts.dtype
        )
        self._whole_adapted = layers.adapted(self._whole)
        self._run_adapted = self._device.compile(self._whole_adapted) if compiled else self._whole_adapted
        weight_bytes = self.size.weight_bytes + layers.num_bytes
        self.size = replace(self.size, weight_bytes=weight_bytes, adapter_width=layers.width)

    def _step(self) -> Callable[..., torch.Tensor]:
        if self._pooling is not None:
            return self._pool
        run: Callable[..., torch.Tensor] = self._model
        return run if self._layout.pipeline == 1 else self._run_stage

    def _prepare_layers(self, *, cached: bool) -> None:
        """Checks that the device serves layers with a cache, and lets expert layers know the device."""
        for layer in self._layers.values():
            if cached and (params := getattr(getattr(layer, "impl", None), "params", None)) is not None:
                self._device.check_attention(params)
            if is_experts(layer):
                layer.device = self._device

    def _names_of_states(self) -> tuple[str, ...]:
        if self._layout.pipeline == 1:
            return ()
        names = names_of_states(self._model, self._config.model_config)
        return () if self._layout.is_first_stage else names

    def load_weights(self, progress: Callable[[int, int, str], None] = lambda *_: None) -> None:
        """Reads or generates the weights and packs them for the device's kernels.

        `progress` is called with the number of files read, the total, and the name of the next file.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import get_model_loader
        from vllm.model_executor.model_loader.utils import process_weights_after_loading
        from vllm.utils.torch_utils import set_default_torch_dtype

        from worker_svc.vllm_adapter.weights import ShardLoader

        model_config, load_config = self._config.model_config, self._config.load_config
        with (
            refusal_on_error(f"cannot load the weights of {model_config.model}"),
            set_current_vllm_config(self._config),
            set_default_torch_dtype(model_config.dtype),
        ):
            # The loader's own load_model() also empties an accelerator's cache, which fails on a CPU.
            loader: Any = (
                get_model_loader(load_config)
                if load_config.load_format == "dummy"
                else ShardLoader(self._config, progress, self._ignored)
            )
            loader.load_weights(self._model, model_config)
            process_weights_after_loading(self._model, model_config, self._device.torch_device)
            self._device.place_weights(self._model)
            if self.adapted is not None:
                self.adapted.attach()
            if self._pooling_head is not None:
                placed = set(self._model.modules())
                for layer in self._pooling_head.modules():
                    if layer not in placed:
                        self._device.place_weights(layer)
        self._model.eval()

    def bind_caches(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Gives each attention layer its KV cache, from those of the layers with one of their own by name."""
        if self._device.caches_are_inputs:
            self._caches = caches
            return
        for layer in self._own_layers():
            self._layers[layer.name].kv_cache = caches[layer.shares_with or layer.name]

    def release_caches(self) -> None:
        """Drops the references to the KV caches to free their memory."""
        self._caches = {}
        self._context.attn_metadata = {}
        for layer in self._own_layers():
            self._layers[layer.name].kv_cache = torch.empty(0)

    def _own_layers(self) -> list[AttentionLayer]:
        return [layer for layer in self.description.layers if layer.here]

    def empty_states(self, tokens: int) -> torch.Tensor:
        """Returns zeros in the shape of the states between stages, for a step of `tokens` tokens."""
        hidden = self._config.model_config.get_hidden_size()
        shape = (len(self._state_names), tokens, hidden)
        return torch.zeros(shape, dtype=self.description.dtype, device=self._device.torch_device)

    def _run_stage(self, first: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Runs the layers of a stage."""
        from vllm.sequence import IntermediateTensors

        given = None
        if not self._layout.is_first_stage:
            # Layers add to their inputs in place.
            own = first.clone().unbind()
            given = IntermediateTensors(dict(zip(self._state_names, own, strict=True)))
        result: Any = self._model(None if given else first, positions, given)
        if self._layout.is_last_stage:
            return cast("torch.Tensor", result)
        return torch.stack([result.tensors[name] for name in sorted(result.tensors)])

    def _pool(self, token_ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Runs a pooling model's layers, pools each row, and runs the head; see `forward`."""
        head = self._pooling_head
        assert head is not None
        if places.shape[0] == _PACKED_PLACES:
            return self._pool_packed(head, token_ids, places)
        lengths, second_text_at = places[0], places[1]
        rows = lengths.shape[0]
        positions = torch.arange(token_ids.shape[0] // rows, device=token_ids.device).repeat(rows)
        is_second = (positions.view(rows, -1) >= second_text_at[:, None]).flatten()
        hidden = self._encode(head, token_ids, positions, is_second)
        return head(pool_rows(hidden.view(rows, -1, hidden.shape[-1]), lengths, head.method))

    def _pool_packed(self, head: PoolingHead, token_ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        lengths, second_text_at, starts = places.unbind()
        tokens = torch.arange(token_ids.shape[0], device=token_ids.device)
        text_of = (tokens[:, None] >= starts + lengths).sum(dim=1)
        is_real = text_of < lengths.shape[0]
        known = text_of.clamp(max=lengths.shape[0] - 1)
        positions = (tokens - starts.index_select(0, known)).masked_fill(~is_real, 0)
        is_second = (positions >= second_text_at.index_select(0, known)) & is_real
        hidden = self._encode(head, token_ids, positions, is_second)
        return head(pool_packed(hidden, places, text_of, head.method))

    def _encode(
        self, head: PoolingHead, token_ids: torch.Tensor, positions: torch.Tensor, is_second: torch.Tensor
    ) -> torch.Tensor:
        """Returns the hidden states of tokens; `is_second` says which are of a pair's second text."""
        hidden: torch.Tensor = (
            self._model(
                is_second.to(torch.int64), positions, inputs_embeds=self._model.embed_input_ids(token_ids)
            )
            if head.takes_types
            else self._model(token_ids, positions)
        )
        return hidden

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        places: torch.Tensor,
        plans: Mapping[str, Any],
        *adapters: torch.Tensor,
    ) -> torch.Tensor:
        """Runs the model's layers, and the head of a pooling model.

        Args:
            token_ids: int64 [tokens]; after the first stage, the result of the previous stage.
            places: positions, int64 [tokens]. A pooling model takes int64 [2, rows] or [3, texts], as
                `RecordableModel` says. Rows have the same number of tokens, with padding.
            plans: by layer name, the attention metadata from `attention_plans` or `row_plans`.
            *adapters: the tokens' LoRA adapters, from `AdaptedLayers.select`; none for the model alone.

        Returns:
            Hidden states [tokens, hidden], in the model's dtype; before the last stage
            [states, tokens, hidden]. A pooling model's result, float32, as `RecordableModel` says.
        """
        from vllm.forward_context import override_forward_context

        self._context.attn_metadata = plans
        with override_forward_context(self._context):
            if not adapters:
                return self._run(token_ids, places)
            assert self.adapted is not None
            try:
                return self._run_adapted(token_ids, places, *adapters)
            finally:
                self.adapted.end_step()

    @torch.inference_mode()
    def record(self, token_ids: torch.Tensor, places: torch.Tensor, *adapters: torch.Tensor) -> Recording:
        """Records `forward` on tensors of these shapes.

        Raises:
            NotStatic: if its work depends on data.
        """
        from vllm.forward_context import override_forward_context

        from worker_svc.vllm_adapter.attention import RecordedAttention

        inputs = tuple(each.clone() for each in (token_ids, places, *adapters))
        whole = self._whole_adapted if adapters else self._whole
        recorder = Recorder(inputs)
        names = self._layers if self._pooling else [layer.name for layer in self._own_layers()]
        self._context.attn_metadata = {name: RecordedAttention(recorder, name) for name in names}
        with override_forward_context(self._context), recorder:
            hidden = whole(*inputs)
        return recorder.finish(hidden)

    def _compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.compute_logits(hidden)
        return logits.float()

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns next-token logits, float32 [rows, vocab_size], of hidden states [rows, hidden].

        They are where the device computes; see `Device.compile`.
        """
        return self._head(hidden)

    def attention_plans(self, groups: Iterable[tuple[Iterable[str], Any]]) -> dict[str, Any]:
        """Builds the metadata for `forward` from each group's layer names and device plan."""
        from worker_svc.vllm_adapter.attention import StepAttention

        plans: dict[str, Any] = {}
        for names, plan in groups:
            if self._device.caches_are_inputs:
                plans.update((name, StepAttention(self._device, plan, self._caches[name])) for name in names)
                continue
            step = StepAttention(self._device, plan)
            plans.update(dict.fromkeys(names, step))
        for layer in self._own_layers():
            if layer.shares_with is not None:
                plans[layer.name] = plans[layer.shares_with]
        return plans

    def row_plans(self, lengths: torch.Tensor, row_len: int | None) -> dict[str, Any]:
        """Builds the metadata for `forward` in a pooling model's step.

        Args:
            lengths: the number of real tokens in each row, int64 [rows].
            row_len: tokens of a row, padding included; `None` if texts are packed.
        """
        from worker_svc.vllm_adapter.attention import StepAttention

        made: dict[tuple[bool, int], StepAttention] = {}
        plans: dict[str, Any] = {}
        for name, layer in self._layers.items():
            params = layer.impl.params
            kind = params.causal, params.window
            if kind not in made:
                plan = (
                    self._device.plan_packed(lengths, params)
                    if row_len is None
                    else self._device.plan_rows(lengths, row_len, params)
                )
                made[kind] = StepAttention(self._device, plan)
            plans[name] = made[kind]
        return plans
