"""vLLM's loader with our own file reader: safetensors only, one shard after another, with progress."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from protos.errors import ConfigurationRefused
from worker_svc.model_files.checkpoint import Checkpoint
from worker_svc.quantization.checkpoint_config import CheckpointQuantization
from worker_svc.quantization.mxfp4 import Mxfp4Experts
from worker_svc.quantization.stored_tensors import StoredLayers
from worker_svc.vllm_adapter.architectures import text_weight
from worker_svc.vllm_adapter.configuration import is_text_model

ShardProgress = Callable[[int, int, str], None]
"""Called with the number of shards read, the total, and the name of the next file."""


class ShardLoader(DefaultModelLoader):
    """Reads a model's weights. vLLM assigns them to layers and checks that none is missing.

    For quantized layers `StoredLayers` does.
    """

    def __init__(
        self, load_config: Any, progress: ShardProgress, quantization: CheckpointQuantization | None = None
    ) -> None:
        """Reads files of a checkpoint that is quantized so, if it is; reports its progress to `progress`."""
        super().__init__(load_config)
        self._progress = progress
        self._quantization = quantization

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
                            yield renamed, common[1]
            except (SafetensorError, OSError) as error:
                raise ConfigurationRefused(f"cannot read {shard.path}: {error}") from error
        if layers is not None:
            layers.check()
        self._progress(len(shards), len(shards), "done")
