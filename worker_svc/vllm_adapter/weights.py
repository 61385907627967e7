"""vLLM's loader with our own file reader: safetensors only, one shard after another, with progress."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from protos.errors import ConfigurationRefused
from worker_svc.model_files.checkpoint import Checkpoint
from worker_svc.vllm_adapter.architectures import as_text_model, text_weight

ShardProgress = Callable[[int, int, str], None]
"""Called with the number of shards read, the total, and the name of the next file."""


class ShardLoader(DefaultModelLoader):
    """Reads a model's weights. vLLM assigns them to layers and checks that none is missing."""

    def __init__(self, load_config: Any, progress: ShardProgress) -> None:
        """Reports its progress to `progress`."""
        super().__init__(load_config)
        self._progress = progress

    def get_all_weights(
        self, model_config: Any, model: torch.nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the names and tensors of all files; of a multimodal checkpoint, those of its text model.

        Raises:
            ConfigurationRefused: if a file is missing or damaged, or the model keeps weights outside its
                folder.
        """
        if getattr(model, "secondary_weights", ()):
            raise ConfigurationRefused(
                f"{model_config.model} keeps weights outside its folder, which is not served;"
                " choose another model"
            )
        rename = text_weight if model_config.hf_overrides is as_text_model else str
        shards = Checkpoint.open(Path(model_config.model)).shards
        for done, shard in enumerate(shards):
            self._progress(done, len(shards), shard.path.name)
            try:
                with safe_open(shard.path, framework="pt") as file:
                    for name in shard.tensors:
                        if renamed := rename(name):
                            yield renamed, file.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise ConfigurationRefused(f"cannot read {shard.path}: {error}") from error
        self._progress(len(shards), len(shards), "done")
