"""Reads LoRA adapters saved by PEFT: adapter_config.json and adapter_model.safetensors.

Changes other than low-rank products of linear layers are refused by name, never ignored.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from protos.errors import InvalidArgument, NotFound

# PEFT reads these as expressions. Matching some expressions takes unbounded time, so only names are compared.
_NAME = re.compile(r"\w+")
# PEFT's expression for the number of a layer in its path, if `layers_pattern` does not say where it is.
_NUMBERED = re.compile(r".*?\.[^.]*\.(?P<number>\d+)\.")


@dataclass(frozen=True)
class Targets:
    """The trained layers of an adapter. PEFT ignores names without a layer."""

    names: Collection[str]
    """`target_modules`: whole paths of layers, or their ends."""
    excluded: Collection[str] = ()
    """`exclude_modules`, in the same form."""
    numbers: Collection[int] = ()
    """`layers_to_transform`; empty for all."""
    lists: Collection[str] = ()
    """`layers_pattern`: the lists of layers with these numbers; empty for any."""

    def include(self, path: str) -> bool:
        """Whether they include the layer with this path."""
        if _matches(path, self.excluded):
            return False
        # PEFT applies the numbers only to names that are ends of paths.
        return path in self.names or (_matches(path, self.names) and self._has_number(path))

    def with_names(self, others: Callable[[str], Iterable[str]]) -> "Targets":
        """Returns targets that include and exclude layers by `others` of each name, too."""
        return replace(
            self,
            names={*self.names, *(other for name in self.names for other in others(name))},
            excluded={*self.excluded, *(other for name in self.excluded for other in others(name))},
        )

    def _has_number(self, path: str) -> bool:
        if not self.numbers:
            return True
        if not self.lists:
            match = _NUMBERED.match(path)
            return match is not None and int(match["number"]) in self.numbers
        for name in self.lists:
            if match := re.match(rf"(?:^|.*?\.){name}\.(?P<number>\d+)\.", path):
                return int(match["number"]) in self.numbers
        return False


def _matches(path: str, names: Collection[str]) -> bool:
    return any(path == name or path.endswith(f".{name}") for name in names)


def read_targets(config: Mapping[str, Any]) -> Targets | None:
    """Returns the layers named by an adapter's configuration; `None` for an expression."""
    names: Any = config.get("target_modules")
    excluded = config.get("exclude_modules") or []
    numbers, lists = config.get("layers_to_transform"), config.get("layers_pattern") or []
    numbers = [numbers] if isinstance(numbers, int) else numbers or []
    lists = [lists] if isinstance(lists, str) else lists
    if not all(_is_list(each, str) for each in (names, excluded, lists)) or not _is_list(numbers, int):
        return None
    if not all(map(_NAME.fullmatch, lists)):
        return None
    return Targets(names, excluded, numbers, lists)


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
_PREFIX = "base_model.model."
_DTYPES = ("F16", "BF16", "F32")
_MOST_CONFIG_BYTES = 1 << 20
# PEFT's patterns are expressions. Matching some expressions takes unbounded time, so only names are served.
_LITERAL = re.compile(r"\^?(?:\w|\\?\.|-){1,256}\$?")
_MATRIX = re.compile(r"(?P<path>.+)\.lora_(?P<which>[AB])(?:\.default)?\.weight")

# Settings of PEFT that change what an adapter computes and that are not served, with the values that turn
# each off.
_UNSERVED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "use_dora": ((False, None), "DoRA"),
    "bias": (("none", None), "trained biases"),
    "lora_bias": ((False, None), "biases of its matrices"),
    "fan_in_fan_out": ((False, None), "transposed weights (fan_in_fan_out)"),
    "modules_to_save": ((None, []), "whole trained modules (modules_to_save)"),
    "target_parameters": ((None, []), "parameters instead of layers (target_parameters), as for experts"),
    "trainable_token_indices": ((None, []), "trained token embeddings (trainable_token_indices)"),
    "layer_replication": ((None, []), "replicated layers (layer_replication)"),
    "alora_invocation_tokens": ((None, []), "activation by tokens (aLoRA)"),
    "arrow_config": ((None,), "routing between adapters (Arrow)"),
    "use_qalora": ((False, None), "QA-LoRA"),
    "use_bdlora": ((None, False), "block-diagonal matrices (BD-LoRA)"),
    "kasa_config": ((None,), "KaSA"),
    "monteclora_config": ((None,), "MonteCLoRA"),
}
# Initializations that change the base model's weights, too. PEFT saves True in their place if it is told to
# convert the adapter.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class LoraLimits:
    """How many adapters a worker holds."""

    max_loras: int
    """Adapter slots on the device."""
    max_rank: int
    """Highest rank of an adapter."""
    max_cpu_loras: int
    """Adapters on the host, those on the device included."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The type of the matrices on the device; "auto" is the model's."""


@dataclass(frozen=True)
class AdapterCheckpoint:
    """An adapter as it was saved."""

    name: str
    """For errors."""
    rank: int
    """The highest rank of its matrices."""
    matrices: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    """By the path of the layer in the base model: A [rank, in] and B [out, rank], float32, B scaled."""
    digest: str
    """Hash of configuration and weights, hexadecimal."""
    targets: Targets | None = None
    """The layers that need matrices, as far as the model contains them; `None` if the configuration does not
    name them."""
    base_model: str = ""
    """The folder or id of the model that it was trained on, as the trainer wrote it; may be empty."""


def is_named_like(base_model: str, served: Iterable[str]) -> bool:
    """Whether an adapter's base model is named like a served model; True without a name.

    Compares the last components of folders and ids without case. Equal weights may carry two names, and
    different weights the same.
    """
    return not base_model or _last_component(base_model) in map(_last_component, served)


def _last_component(model: str) -> str:
    return re.split(r"[/\\]", model.rstrip("/\\"))[-1].casefold()


def read_adapter(folder: Path, *, name: str, max_rank: int) -> AdapterCheckpoint:
    """Reads and checks an adapter that PEFT saved.

    Raises:
        NotFound: if the folder or a file is missing.
        InvalidArgument: if the adapter is damaged or needs something that is not served; names it.
    """
    config = _read_config(folder, name)
    _check_config(config, name)
    tensors, weights_hash = _read_tensors(folder, name, max_rank)
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        path, which = _place_of(key, name)
        if which in pairs.setdefault(path, {}):
            raise InvalidArgument(f"adapter {name} has two matrices {which} of {path}", param="source")
        pairs[path][which] = tensor
    matrices = {path: _scaled(config, path, pair, name) for path, pair in sorted(pairs.items())}
    if not matrices:
        raise InvalidArgument(f"adapter {name} has no weights in {WEIGHTS}", param="source")
    rank = max(a.shape[0] for a, _ in matrices.values())
    text = json.dumps(config, sort_keys=True).encode()
    digest = hashlib.sha256(text + weights_hash).hexdigest()
    base_model = config.get("base_model_name_or_path")
    return AdapterCheckpoint(
        name, rank, matrices, digest, read_targets(config), base_model if isinstance(base_model, str) else ""
    )


def _read_config(folder: Path, name: str) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise NotFound(
            f"adapter {name}: {folder} has no {CONFIG}; pass a folder that PEFT has saved", param="source"
        )
    if path.stat().st_size > _MOST_CONFIG_BYTES:
        raise InvalidArgument(f"adapter {name}: {CONFIG} is larger than 1 MiB", param="source")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"adapter {name}: {CONFIG} cannot be read: {error}", param="source") from error
    if not isinstance(config, dict):
        raise InvalidArgument(f"adapter {name}: {CONFIG} is not a JSON object", param="source")
    return config


def _check_config(config: Mapping[str, Any], name: str) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise InvalidArgument(f"adapter {name} is of kind {kind}, but only LORA is served", param="source")
    task = config.get("task_type")
    if task not in (None, "CAUSAL_LM"):
        raise InvalidArgument(
            f"adapter {name} is for {task}, but only CAUSAL_LM adapters are served", param="source"
        )
    for field, (off, what) in _UNSERVED.items():
        if field in config and config[field] not in off:
            raise InvalidArgument(f"adapter {name} uses {what}, which is not served", param="source")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CHANGES_BASE):
        raise InvalidArgument(
            f"adapter {name} was initialized by {start}, which changes the base model;"
            " save it with path_initial_model_for_weight_conversion",
            param="source",
        )
    for field in ("r", "lora_alpha"):
        value = config.get(field)
        if not _is_size(value):
            raise InvalidArgument(
                f"adapter {name}: {field} in {CONFIG} is {value!r}, not a positive number", param="source"
            )
    for field in ("rank_pattern", "alpha_pattern"):
        value = config.get(field) or {}
        if not isinstance(value, dict) or not all(map(_is_size, value.values())):
            raise InvalidArgument(
                f"adapter {name}: {field} in {CONFIG} is not an object of positive numbers", param="source"
            )
        for pattern in value:
            if not _LITERAL.fullmatch(pattern):
                raise InvalidArgument(
                    f"adapter {name}: {field} in {CONFIG} has {pattern!r};"
                    " only names of layers are served, no other expressions",
                    param="source",
                )


def _is_size(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1 << 20


def _read_tensors(folder: Path, name: str, max_rank: int) -> tuple[dict[str, torch.Tensor], bytes]:
    """Returns the tensors by their keys, and a hash of the file. Reads no tensor before all are checked."""
    from safetensors import SafetensorError, safe_open

    path = folder / WEIGHTS
    if not path.is_file():
        if (folder / _PICKLED).is_file():
            raise InvalidArgument(
                f"adapter {name} has pickled weights ({_PICKLED}), which may run code;"
                " save it with safe_serialization=True",
                param="source",
            )
        raise NotFound(f"adapter {name}: {folder} has no {WEIGHTS}", param="source")
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is not a dictionary
                described = file.get_slice(key)
                _check_described(key, described.get_shape(), described.get_dtype(), name, max_rank)
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        with path.open("rb") as stream:
            return tensors, hashlib.file_digest(stream, "sha256").digest()
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise InvalidArgument(f"adapter {name}: {WEIGHTS} cannot be read: {error}", param="source") from error


def _check_described(key: str, shape: Sequence[int], dtype: str, name: str, max_rank: int) -> None:
    _, which = _place_of(key, name)
    if dtype not in _DTYPES:
        raise InvalidArgument(f"adapter {name}: {key} has the type {dtype}, not a float's", param="source")
    if len(shape) != 2:
        raise InvalidArgument(f"adapter {name}: {key} is {tuple(shape)}, not a matrix", param="source")
    rank = shape[0] if which == "A" else shape[1]
    if rank > max_rank:
        raise InvalidArgument(
            f"adapter {name} has rank {rank}, above --max-lora-rank {max_rank};"
            " restart the workers with a higher one",
            param="source",
        )


def _place_of(key: str, name: str) -> tuple[str, str]:
    """Returns the path of the layer in the base model, and the kind of matrix."""
    if match := _MATRIX.fullmatch(key):
        return match["path"].removeprefix(_PREFIX), match["which"]
    if "lora_embedding_" in key:
        raise InvalidArgument(
            f"adapter {name} adapts the embedding ({key}), which is not served; train it without embed_tokens",
            param="source",
        )
    raise InvalidArgument(
        f"adapter {name} has a tensor that is not served: {key}; only lora_A and lora_B of linear layers are",
        param="source",
    )


def _scaled(
    config: Mapping[str, Any], path: str, pair: Mapping[str, torch.Tensor], name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a layer's matrices in float32, B with the adapter's scaling."""
    if set(pair) != {"A", "B"}:
        raise InvalidArgument(f"adapter {name} has only one of the two matrices of {path}", param="source")
    a, b = pair["A"], pair["B"]
    if a.shape[0] != b.shape[1]:
        raise InvalidArgument(
            f"adapter {name}: the matrices of {path} do not fit together:"
            f" A is {tuple(a.shape)}, B is {tuple(b.shape)}",
            param="source",
        )
    rank = _of_pattern(config, "rank_pattern", path, config["r"])
    if rank != a.shape[0]:
        raise InvalidArgument(
            f"adapter {name}: {path} has rank {a.shape[0]} in {WEIGHTS}, but {rank:g} in {CONFIG}",
            param="source",
        )
    alpha = _of_pattern(config, "alpha_pattern", path, config["lora_alpha"])
    a, b = a.float(), b.float() * (alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))
    if not (bool(a.isfinite().all()) and bool(b.isfinite().all())):
        raise InvalidArgument(f"adapter {name}: the matrices of {path} are not finite", param="source")
    return a, b


def _of_pattern(config: Mapping[str, Any], field: str, path: str, default: float) -> float:
    """Returns the value of the first pattern that matches the end of a path, as PEFT looks it up."""
    for pattern, value in (config.get(field) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            return float(value)
    return float(default)
