"""vLLM's loader with our own file reader: safetensors only, shard by shard, with progress."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from protos.errors import ConfigurationRefused
from protos.service.logs import get_logger
from worker_svc.model_files.checkpoint import Checkpoint
from worker_svc.quantized.stored_tensors import Mxfp4Experts, StoredLayers
from worker_svc.vllm_adapter.configuration import is_text_model, text_weight

ShardProgress = Callable[[int, int, str], None]
"""Called with the number of shards read, the total, and the name of the next file."""
# Names in the log line of ignored tensors.
_MOST_NAMED = 10


class StoredForm:
    """From the tensors of a checkpoint to those that vLLM's loaders take: names and quantized forms."""

    def __init__(self, config: Any) -> None:
        """Reads nothing.

        Args:
            config: vLLM's.
        """
        model_config = config.model_config
        quantization = getattr(config.quant_config, "quantization", None)
        self._rename = text_weight if is_text_model(model_config) else str
        self._layers = None if quantization is None else StoredLayers(quantization)
        self._take = Mxfp4Experts(model_config.dtype).take if self._layers is None else self._layers.take

    def take(self, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """Returns a tensor's name and value for vLLM; `None` if nothing is left of it.

        Raises:
            ConfigurationRefused: if it is quantized in an unserved way.
        """
        if self._rename(name) is None:
            return None
        common = self._take(name, tensor)
        if common is None or (renamed := self._rename(common[0])) is None:
            return None
        return renamed, common[1]

    def finish(self) -> None:
        """Compares the tensors with each other, after the last.

        Raises:
            ConfigurationRefused: Codes and scales of a layer do not fit.
        """
        if self._layers is not None:
            self._layers.check()


class ShardLoader(DefaultModelLoader):
    """Reads a model's weights, which `comparison` has compared with the model."""

    def __init__(self, config: Any, progress: ShardProgress, ignored: frozenset[str]) -> None:
        """Reads the files of a model.

        Args:
            config: vLLM's.
            progress: called between files.
            ignored: names of tensors that the model does not take.
        """
        super().__init__(config.load_config)
        self._config = config
        self._progress = progress
        self._ignored = ignored

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Assigns the weights; names ignored files and tensors in a log line.

        Raises:
            ConfigurationRefused: as `get_all_weights`.
        """
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
        """Yields the names and tensors of all files; of a multimodal checkpoint, those of its text model.

        Raises:
            ConfigurationRefused: A file is missing or damaged, the model keeps weights outside its
                folder, or its quantized weights are not served.
        """
        if getattr(model, "secondary_weights", ()):
            raise ConfigurationRefused(
                f"{model_config.model} keeps weights outside its folder, which is not served;"
                " choose another model"
            )
        form = StoredForm(self._config)
        shards = Checkpoint.open(Path(model_config.model)).shards
        for done, shard in enumerate(shards):
            self._progress(done, len(shards), shard.path.name)
            try:
                with safe_open(shard.path, framework="pt") as file:
                    for name in shard.tensors:
                        if name in self._ignored:
                            continue
                        taken = form.take(name, file.get_tensor(name))
                        if taken is not None:
                            yield taken
            except (SafetensorError, OSError) as error:
                raise ConfigurationRefused(f"cannot read {shard.path}: {error}") from error
        form.finish()
        self._progress(len(shards), len(shards), "done")
