"""Reads the quantization of a model's weights from its configuration, and refuses all that is not served.

Served are weights of 4 or 8 bits, symmetric, in groups of 32, 64 or 128 inputs or per output channel, as
compressed-tensors (`pack-quantized`), GPTQ or AWQ store them. The restrictions, except for GGUF's groups of
32, are those of NPUs' kernels.
"""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from safetensors import SafetensorError, safe_open

from protos.errors import ConfigurationRefused
from worker_svc.quantized.codes import GROUPS, Bits, Scheme

Format = Literal["compressed-tensors", "gptq", "awq"]

_BITS: Final[tuple[Bits, ...]] = (4, 8)
_PACKED: Final = "pack-quantized"
_OTHER: Final = "choose another checkpoint, or make one with `triptych quantize`"
# Files that describe the quantization where config.json does not, by method.
_OWN_FILES: Final = {
    "gptq": "quantize_config.json", "awq": "quant_config.json", "modelopt": "hf_quant_config.json",
}  # fmt: skip
MARLIN: Final = "is in Marlin's own layout, which is not served; choose a checkpoint in GPTQ's layout"
"""The end of the refusal of weights that were repacked for Marlin's kernels."""


@dataclass(frozen=True)
class CheckpointQuantization:
    """How a checkpoint's weights are quantized."""

    format: Format
    """The names and layouts of the tensors."""
    schemes: tuple[tuple[tuple[str, ...], Scheme], ...]
    """Targets and their scheme. A target is a module's name, "re:" and an expression for names, or "Linear"
    for all linear layers; names come first."""
    ignored: tuple[str, ...] = ()
    """Names of modules to leave as they are, or expressions after "re:"."""

    def __str__(self) -> str:
        """Returns words for people."""
        schemes = ", ".join(sorted({str(scheme) for _, scheme in self.schemes}))
        return f"{self.format}: {schemes}"

    def scheme_of(self, name: str) -> Scheme | None:
        """Returns the scheme of a linear layer of that name, if any."""
        if any(_matches(name, each) for each in self.ignored):
            return None
        for targets, scheme in self.schemes:
            if any(_matches(name, target) for target in targets):
                return scheme
        for targets, scheme in self.schemes:
            if "Linear" in targets:
                return scheme
        return None


def read_config(folder: Path) -> dict[str, Any]:
    """Returns a model's config.json; refuses one that cannot be read."""
    config = _read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise ConfigurationRefused(f"config.json of {folder} is not a JSON object")
    return config


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationRefused(f"cannot read {path.name} of {path.parent}: {error}") from error


def stored_config(config: Mapping[str, Any], folder: Path) -> Any:
    """Returns the description of a model's quantization in its config.json or its folder, if any."""
    for part in (config, config.get("text_config") or {}):
        for name in ("quantization_config", "compression_config"):
            if part.get(name):
                return part[name]
    for method, name in _OWN_FILES.items():
        if (folder / name).exists() and (method == "modelopt" or _holds_codes(folder)):
            found = _read_json(folder / name)
            return {**found, "quant_method": method} if isinstance(found, dict) else found
    return None


def _holds_codes(folder: Path) -> bool:
    """Returns whether weights are stored as codes. With plain weights, a description is a left-over."""
    for path in folder.glob("*.safetensors"):
        # The check of tensors names a damaged file, unless it is not used.
        with contextlib.suppress(OSError, SafetensorError), safe_open(path, "np") as file:
            if any(name.endswith(".qweight") for name in file.keys()):  # noqa: SIM118 - not a mapping
                return True
    return False


def read(folder: Path) -> CheckpointQuantization | None:
    """Reads the quantization of a model; `None` without any, and for MXFP4, which is dequantized."""
    config = read_config(folder)
    found = stored_config(config, folder)
    if found is None:
        return None
    try:
        method = str(found.get("quant_method") or "").lower().replace("_", "-")
        if method == "compressed-tensors":
            return _compressed_tensors(found)
        if method == "gptq":
            return _gptq(found)
        if method == "awq":
            return _awq(found)
        if method == "mxfp4" and found is config.get("quantization_config"):
            return None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigurationRefused(
            f"{folder / 'config.json'} has a quantization_config that cannot be read ({error!r}); fetch it again"
        ) from error
    by = method or "a method that config.json does not name"
    raise _refuse(
        f"the checkpoint is quantized by {by} (served: compressed-tensors, gptq, awq, and mxfp4 of gpt-oss)"
    )


def quantization_group(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    """Returns a group of `quantization_config` in the form of compressed-tensors."""
    weights = {
        "num_bits": scheme.bits, "type": "int", "symmetric": True, "dynamic": False, "actorder": None,
        "strategy": "channel" if scheme.group is None else "group", "group_size": scheme.group,
    }  # fmt: skip
    return {"targets": targets, "weights": weights, "input_activations": None, "output_activations": None}


def quantization_config(groups: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
    """Returns the `quantization_config` of config.json."""
    return {
        "quant_method": "compressed-tensors", "format": _PACKED, "quantization_status": "compressed",
        "config_groups": groups, "ignore": ignored,
    }  # fmt: skip


def _refuse(what: str) -> ConfigurationRefused:
    return ConfigurationRefused(f"{what}, which is not served; {_OTHER}")


def _scheme(bits: int, group: int | None) -> Scheme:
    if bits not in _BITS:
        raise _refuse(f"the checkpoint has weights of {bits} bits (served: 4 and 8)")
    group = None if group in (None, -1) else group
    if group is not None and group not in GROUPS:
        served = ", ".join(map(str, GROUPS))
        raise _refuse(f"the checkpoint has groups of {group} inputs (served: {served} and per channel)")
    return Scheme(_BITS[_BITS.index(bits)], group)


def _compressed_tensors(found: Mapping[str, Any]) -> CheckpointQuantization | None:
    if found.get("kv_cache_scheme"):
        raise _refuse("the checkpoint quantizes the KV cache")
    if (found.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise _refuse("the checkpoint has sparse weights")
    if found.get("transform_config"):
        raise _refuse("the checkpoint transforms activations (transform_config)")
    if found.get("format") == "dense" and not found.get("config_groups"):
        return None
    schemes = []
    for group in found["config_groups"].values():
        kind = group.get("format") or found.get("format")
        if group.get("input_activations") or group.get("output_activations"):
            raise _refuse("the checkpoint quantizes activations")
        if kind != _PACKED:
            raise _refuse(f"the checkpoint has the format {kind} (served: {_PACKED})")
        targets = tuple(map(str, group["targets"]))
        if "Embedding" in targets or any(target.endswith("embed_tokens") for target in targets):
            raise _refuse("the checkpoint quantizes the embeddings")
        schemes.append((targets, _compressed_scheme(group["weights"])))
    if not schemes:
        raise _refuse("the checkpoint has a quantization_config without weights")
    return CheckpointQuantization("compressed-tensors", tuple(schemes), _strings(found.get("ignore")))


def _compressed_scheme(weights: Mapping[str, Any]) -> Scheme:
    if weights.get("type", "int") != "int":
        raise _refuse(f"the checkpoint has weights of type {weights['type']} (served: int)")
    if not weights.get("symmetric", True):
        raise _refuse("the checkpoint has zero points (symmetric is false)")
    if weights.get("actorder") not in (None, False, "static", "weight"):
        raise _refuse("the checkpoint has groups in the order of activations (actorder, g_idx)")
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "channel")
    if strategy not in ("group", "channel"):
        raise _refuse(f"the checkpoint has a scale per {strategy} (served: group and channel)")
    return _scheme(weights["num_bits"], weights.get("group_size") if strategy == "group" else None)


def _gptq(found: Mapping[str, Any]) -> CheckpointQuantization:
    bits = int(found["bits"])
    if not found.get("sym", True):
        raise _refuse("the checkpoint has zero points (sym is false)")
    if found.get("desc_act"):
        raise _refuse("the checkpoint has groups in the order of activations (desc_act, g_idx)")
    if found.get("dynamic"):
        raise _refuse("the checkpoint quantizes layers differently (dynamic)")
    scheme = _scheme(bits, int(found["group_size"]))
    version = str(found.get("checkpoint_format") or found.get("format") or "gptq")
    if version == "marlin" or found.get("is_marlin_format"):
        raise ConfigurationRefused(f"the checkpoint {MARLIN}")
    if version not in ("gptq", "gptq_v2"):
        raise _refuse(f"the checkpoint has GPTQ's format {version} (served: gptq and gptq_v2)")
    listed = {name for names in found.get("modules_in_block_to_quantize") or () for name in _listed(names)}
    targets = tuple(f"re:.*\\.{re.escape(name)}$" for name in sorted(listed)) or ("Linear",)
    ignored = () if found.get("lm_head") else ("re:.*lm_head",)
    return CheckpointQuantization("gptq", ((targets, scheme),), ignored)


def _listed(names: str | Sequence[str]) -> Sequence[str]:
    return [names] if isinstance(names, str) else names


def _awq(found: Mapping[str, Any]) -> CheckpointQuantization:
    bits, group = found.get("bits", found.get("w_bit")), found.get("group_size", found.get("q_group_size"))
    version = str(found.get("version", "gemm")).lower()
    if version != "gemm":
        raise _refuse(f"the checkpoint has AWQ's format {version} (served: gemm)")
    if bits != 4:
        raise _refuse(f"the checkpoint has AWQ weights of {bits} bits (served: 4)")
    scheme = _scheme(int(bits), int(group if group is not None else -1))
    kept = [f"re:.*{re.escape(name)}.*" for name in _strings(found.get("modules_to_not_convert"))]
    return CheckpointQuantization("awq", ((("Linear",), scheme),), ("re:.*lm_head", *kept))


def _strings(names: Sequence[str] | None) -> tuple[str, ...]:
    return tuple(map(str, names or ()))


def _matches(name: str, target: str) -> bool:
    if target.startswith("re:"):
        try:
            return re.match(target[3:], name) is not None
        except re.error as error:
            raise _refuse(
                f"quantization_config has {target!r}, which is not an expression ({error})"
            ) from error
    return name == target or name.endswith(f".{target}")
