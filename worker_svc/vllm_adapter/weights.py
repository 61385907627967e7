"""vLLM's loader with our own file reader: safetensors only, one shard after another, with progress."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.utils import AutoWeightsLoader

from protos.errors import ConfigurationRefused
from protos.logs import get_logger
from worker_svc.model_files.checkpoint import Checkpoint
from worker_svc.quantized.checkpoint_config import CheckpointQuantization
from worker_svc.quantized.mxfp4 import Mxfp4Experts
from worker_svc.quantized.stored_tensors import StoredLayers
from worker_svc.vllm_adapter.architectures import text_weight
from worker_svc.vllm_adapter.configuration import is_text_model

ShardProgress = Callable[[int, int, str], None]
"""Called with the number of shards read, the total, and the name of the next file."""
# Names in the log line of ignored tensors.
_MOST_NAMED = 10


class ShardLoader(DefaultModelLoader):
    """Reads a model's weights. vLLM assigns them to layers and checks that none is missing.

    For quantized layers `StoredLayers` does. Tensors of unknown modules are ignored, as in transformers, but
    not a surplus of layers: without them the model is another one.
    """

    def __init__(
        self, load_config: Any, progress: ShardProgress, quantization: CheckpointQuantization | None = None
    ) -> None:
        """Reads files of a checkpoint that is quantized so, if it is; reports its progress to `progress`."""
        super().__init__(load_config)
        self._progress = progress
        self._quantization = quantization
        # The name of the tensor that vLLM assigns at the moment.
        self._current = ""
        # Names of unknown layers and tensors, in the checkpoint's order.
        self._unknown: dict[str, None] = {}

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Assigns the weights; names ignored files and tensors in one log line.

        Raises:
            ConfigurationRefused: as `get_all_weights`, or if tensors are unknown and others are missing.
        """
        with self._tolerating_unknown():
            super().load_weights(model, model_config)
        files = Checkpoint.open(Path(model_config.model)).ignored
        if files or self._unknown:
            names = list(self._unknown)
            get_logger().warning(
                "extra_weights_ignored", files=list(files), tensors=names[:_MOST_NAMED],
                num_tensors=len(names),
            )  # fmt: skip

    @contextlib.contextmanager
    def _tolerating_unknown(self) -> Iterator[None]:
        """Lets the loaders of vLLM's models ignore tensors outside the layers that have weights."""
        known = AutoWeightsLoader._can_ignore_unexpected  # noqa: SLF001 - vLLM has no setting for it

        def can_ignore(loader: AutoWeightsLoader, name: str) -> bool:
            if known(loader, name):
                return True
            parent, _, part = name.removesuffix(".").rpartition(".")
            if _has_weights(loader.module, parent):
                return False
            if part.isdigit():
                raise ConfigurationRefused(
                    f"the weights have layers that config.json does not describe, the first one {self._current};"
                    " use the config.json that belongs to the weights"
                )
            parts = self._current.split(".")
            end = parts.index(part) + 1 if part in parts else len(parts)
            self._unknown[".".join(parts[:end])] = None
            return True

        AutoWeightsLoader._can_ignore_unexpected = can_ignore  # noqa: SLF001
        try:
            yield
        finally:
            AutoWeightsLoader._can_ignore_unexpected = known  # noqa: SLF001

    def track_weights_loading(
        self, model: torch.nn.Module, loaded_weights: set[str] | None, quantized: bool = False
    ) -> None:
        """Checks for missing weights; strictly if there are unknown ones, which may be the same renamed."""
        # vLLM adds weights that it does not check.
        loaded = set(loaded_weights or ())
        super().track_weights_loading(model, loaded_weights, quantized)
        missing = [name for name, _ in model.named_parameters() if name not in loaded]
        if loaded_weights is not None and self._unknown and missing:
            raise ConfigurationRefused(
                f"the weights have no {', '.join(missing)}, but unknown {', '.join(self._unknown)};"
                " check architectures in config.json"
            )

    def get_all_weights(
        self, model_config: Any, model: torch.nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the names and tensors of all files; of a multimodal checkpoint, those of its text model.

        Raises:
            ConfigurationRefused: if a file is missing or damaged, the model keeps weights outside its
                folder, or its quantized weights are not served.
        """
        if getattr(model, "secondary_weights", ()):
            raise ConfigurationRefused(
                f"{model_config.model} keeps weights outside its folder, which is not served;"
                " choose another model"
            )
        rename = text_weight if is_text_model(model_config) else str
        layers = None if self._quantization is None else StoredLayers(self._quantization)
        take = Mxfp4Experts(model_config.dtype).take if layers is None else layers.take
        shards = Checkpoint.open(Path(model_config.model)).shards
        for done, shard in enumerate(shards):
            self._progress(done, len(shards), shard.path.name)
            try:
                with safe_open(shard.path, framework="pt") as file:
                    for name in shard.tensors:
                        if rename(name) is None:
                            continue
                        tensor = file.get_tensor(name)
                        common = take(name, tensor)
                        if common is not None and (renamed := rename(common[0])):
                            self._current = renamed
                            yield renamed, common[1]
            except (SafetensorError, OSError) as error:
                raise ConfigurationRefused(f"cannot read {shard.path}: {error}") from error
        if layers is not None:
            layers.check()
        self._progress(len(shards), len(shards), "done")


def _has_weights(model: torch.nn.Module, name: str) -> bool:
    """Whether a module has weights of its own, or holds fused layers.

    An unknown tensor there belongs to another form of the layer, for example a quantized one.
    """
    try:
        module = model.get_submodule(name)
    except AttributeError:  # a weight
        return True
    fused = any(hasattr(child, "output_sizes") for child in module.children())
    return fused or any(True for _ in module.parameters(recurse=False))
