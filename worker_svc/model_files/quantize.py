"""Makes a checkpoint of compressed-tensors (`pack-quantized`) from a floating-point model, shard by shard.

The projections of decoder layers are quantized, and the output head on request. Everything else stays.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from protos.errors import ConfigurationRefused
from worker_svc.model_files.checkpoint import Checkpoint, Shard
from worker_svc.quantized import codes
from worker_svc.quantized.calibration import TOKENS, Calibrated, Progress, calibrate
from worker_svc.quantized.checkpoint_config import (
    quantization_config,
    quantization_group,
    read_config,
    stored_config,
)
from worker_svc.quantized.codes import Scheme, quantize

HEAD: Final = Scheme(8, None)
"""The scheme of an output head, whose errors move every logit."""
_INDEX: Final = "model.safetensors.index.json"
_PROJECTION: Final = re.compile(r"(.+\.)?layers\.\d+\..+_proj\.weight")
# Encoders of images and sound, which such servers do not run.
_OTHER_TOWER: Final = re.compile(r"vision|visual|audio|encoder")
# GraniteMoe has all experts of a layer in one tensor, under the second kind of name.
_EXPERTS: Final = re.compile(r"\.experts\.|\.block_sparse_moe\.(input|output)_linear\.")
# Attention reads the rows of this projection in place, so codes cannot replace them.
_LATENT: Final = ".kv_b_proj.weight"
_EMBEDDINGS: Final = "model.embed_tokens.weight"
_HEAD: Final = "lm_head.weight"
# In safetensors' names.
_FLOATS: Final = ("BF16", "F16", "F32")
_MATRIX: Final = 2
_INPUTS: Final = 8  # of a word with codes of 4 bits
_OS_ERROR: Final = re.compile(r"\(os error (\d+)\)")
# Everything else in a folder, such as the tokenizer, is copied.
_WEIGHT_FILES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True)
class Calibration:
    """The text for calibration."""

    text: Path | None = None
    """A file; `None` for text written by the model."""
    tokens: int = TOKENS
    """Length of the text."""


@dataclass(frozen=True)
class Quantized:
    """Facts about a new checkpoint."""

    matrices: int
    """Quantized matrices."""
    has_head: bool
    """Whether the output head is quantized."""
    bytes_before: int
    """Of all weight files."""
    bytes_after: int
    rounded: tuple[str, ...]
    """Projections that calibration did not reach; empty without calibration."""


def quantize_folder(
    source: Path,
    target: Path,
    scheme: Scheme,
    *,
    head: bool,
    calibration: Calibration | None = None,
    progress: Progress = lambda *_: None,
) -> Quantized:
    """Writes the quantized model; `target` is complete or absent.

    Args:
        source: a Hugging Face folder with safetensors files.
        target: must not exist; its parent must.
        scheme: of the projections.
        head: whether to quantize the output head to 8 bits per channel. A head that shares the weights of the
            embeddings gets a copy. A head with another name, such as a multimodal model's, stays.
        calibration: the text; by default, projections are rounded. The head always is.
        progress: reports checked files, steps of calibration and written files.
    """
    if target.exists():
        raise ConfigurationRefused(f"{target} exists already; choose another folder for the result")
    maker = _Maker(source, Checkpoint.open(source), scheme, head=head)
    inputs = maker.check()
    try:
        # Made before calibration, which takes minutes and whose result would otherwise be lost.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
            if calibration is not None:
                maker.calibrate(calibration, inputs, progress)
            folder = Path(scratch) / target.name
            folder.mkdir()
            made = maker.write(folder, progress)
            folder.rename(target)
            return made
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationRefused(f"cannot write {target}: {reason}") from error


class _Maker:
    def __init__(self, source: Path, checkpoint: Checkpoint, scheme: Scheme, *, head: bool) -> None:
        self._source, self._shards, self._scheme = source, checkpoint.shards, scheme
        self._config = read_config(source)
        if stored_config(self._config, source) is not None:
            raise ConfigurationRefused(f"{source} is quantized already; choose a model in bfloat16")
        names = {name for shard in self._shards for name in shard.tensors}
        if expert := next(filter(_EXPERTS.search, sorted(names)), None):
            raise ConfigurationRefused(
                f"{source} has experts ({expert}), whose quantized form is not served; choose another model"
            )
        if latent := next((name for name in sorted(names) if name.endswith(_LATENT)), None):
            raise ConfigurationRefused(
                f"{source} has latent attention ({latent}), whose quantized form is not served;"
                " choose another model"
            )
        self._is_tied = _HEAD not in names
        stored = _EMBEDDINGS if self._is_tied else _HEAD
        # The head's tensor, if it is to be quantized.
        self._head = stored if head and stored in names else None
        self._count = 0
        self._kept: list[str] = []
        self._calibrated: Calibrated | None = None
        self._rounded: list[str] = []

    def check(self) -> dict[str, int]:
        """Checks the headers of all files; returns the number of inputs of each projection by tensor name."""
        inputs: dict[str, int] = {}
        for shard in self._shards:
            for name, tensor in shard.tensors.items():
                is_head = name == self._head
                if len(tensor.shape) != _MATRIX or not (is_head or _is_projection(name)):
                    continue
                if tensor.kind not in _FLOATS:
                    raise ConfigurationRefused(
                        f"{name} has the type {tensor.kind}; choose a model in bfloat16, float16 or float32"
                    )
                if not is_head:
                    inputs[name] = tensor.shape[1]
        if not inputs:
            raise ConfigurationRefused(
                f"{self._source} has no projections of decoder layers to quantize; choose another model"
            )
        _check_inputs(inputs, self._scheme)
        return inputs

    def calibrate(self, calibration: Calibration, inputs: Mapping[str, int], progress: Progress) -> None:
        """Calibrates the projections; `inputs` are their numbers of inputs by tensor name."""
        quantized = {*inputs, *([self._head] if self._head else [])}
        # Calibration takes minutes, so a matrix that `write` would refuse is found before.
        for done, shard in enumerate(self._shards):
            progress(done, len(self._shards), f"checking {shard.path.name}")
            with _reading(shard.path) as file:
                for name in quantized & shard.tensors.keys():
                    _check_finite(name, file.get_tensor(name))
        modules = {name.removesuffix(".weight"): each for name, each in inputs.items()}
        self._calibrated = calibrate(
            self._source, modules, self._scheme, calibration.text, calibration.tokens, progress
        )

    def write(self, folder: Path, progress: Progress) -> Quantized:
        weight_map: dict[str, str] = {}
        before = after = 0
        for done, shard in enumerate(self._shards):
            progress(done, len(self._shards), shard.path.name)
            tensors = dict(self._quantized(shard))
            path = folder / shard.path.name
            _save(tensors, path)
            weight_map |= dict.fromkeys(tensors, path.name)
            before += sum(tensor.num_bytes for tensor in shard.tensors.values())
            after += sum(tensor.nbytes for tensor in tensors.values())
        for path in sorted(self._source.iterdir()):
            if (
                path.is_file()
                and path.name[0] != "."
                and not path.name.endswith((*_WEIGHT_FILES, ".index.json"))
            ):
                shutil.copyfile(path, folder / path.name)
            elif (path / "config.json").is_file():
                # Modules of Sentence Transformers, which describe the pooling.
                shutil.copytree(path, folder / path.name)
        if len(self._shards) > 1:
            _write(folder / _INDEX, {"metadata": {"total_size": after}, "weight_map": weight_map})
        _write(folder / "config.json", self._new_config())
        progress(len(self._shards), len(self._shards), "done")
        return Quantized(self._count, self._head is not None, before, after, tuple(self._rounded))

    def _quantized(self, shard: Shard) -> Iterator[tuple[str, torch.Tensor]]:
        with _reading(shard.path) as file:
            for name in shard.tensors:
                tensor = file.get_tensor(name)
                if name == self._head:
                    yield from self._matrix(_HEAD, tensor, HEAD)
                    if not self._is_tied:
                        continue
                elif (
                    tensor.dim() == _MATRIX and name.endswith(".weight") and name not in (_EMBEDDINGS, _HEAD)
                ):
                    if _is_projection(name):
                        yield from self._matrix(name, tensor, self._scheme)
                        continue
                    # Listed as ignored in the configuration.
                    self._kept.append(name.removesuffix(".weight"))
                yield name, tensor

    def _matrix(self, name: str, weight: torch.Tensor, scheme: Scheme) -> Iterator[tuple[str, torch.Tensor]]:
        _check_finite(name, weight)
        module = name.removesuffix(".weight")
        found, scales = self._codes(module, weight, scheme)
        self._count += 1
        yield f"{module}.weight_packed", codes.pack(found, scheme.bits)
        yield f"{module}.weight_scale", scales
        yield f"{module}.weight_shape", torch.tensor(weight.shape)

    def _codes(self, module: str, weight: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
        if self._calibrated is not None and module != _HEAD.removesuffix(".weight"):
            if made := self._calibrated.get(module):
                codes_found, scales = made
                return codes_found, scales.to(weight.dtype)
            self._rounded.append(module)
        return quantize(weight, scheme)

    def _new_config(self) -> dict[str, Any]:
        groups = {"group_0": quantization_group(self._scheme, ["Linear"])}
        if self._head:
            groups["group_1"] = quantization_group(HEAD, ["lm_head"])
        ignored = [*self._kept, *([] if self._head else ["lm_head"])]
        config = self._config | {"quantization_config": quantization_config(groups, ignored)}
        return config | ({"tie_word_embeddings": False} if self._head else {})


def _is_projection(name: str) -> bool:
    return _PROJECTION.fullmatch(name) is not None and not _OTHER_TOWER.search(name)


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ConfigurationRefused(f"cannot read {path}: {error}") from error


def _check_finite(name: str, weight: torch.Tensor) -> None:
    if not bool(weight.isfinite().all()):
        raise ConfigurationRefused(f"{name} is not finite; fetch the model again")


def _check_inputs(inputs: Mapping[str, int], scheme: Scheme) -> None:
    """Refuses matrices with inputs that do not fill groups or words; suggests a group that all fill."""
    unit = scheme.group or _INPUTS
    unfit = next((name for name, size in inputs.items() if size % unit), None)
    if unfit is None:
        return
    units = {"128": 128, "64": 64, "32": 32, "channel": _INPUTS}
    fitting = [name for name, each in units.items() if all(size % each == 0 for size in inputs.values())]
    way = f"use --group-size {fitting[0]}" if fitting else "choose another model"
    raise ConfigurationRefused(
        f"{unfit} has {inputs[unfit]} inputs, which is not a multiple of {unit}; {way}"
    )


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Writes a file of weights. safetensors' own error names the system's reason in its text only."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        if number := _OS_ERROR.search(str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        raise
    path.chmod(0o644)  # save_file makes it private


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
