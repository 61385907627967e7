"""Names and arguments of the operators, in both of their namespaces.

Each argument has a role, which is the same in every operator (`q`, `scale`, …), and a name, which differs
between the namespaces. The order of mask, scale and position differs between operators, so only
`registry` passes arguments by position.
"""

from dataclasses import dataclass
from typing import Final, Literal

Namespace = Literal["rbln_custom_ops", "rbln_triton_ops"]
CUSTOM: Final[Namespace] = "rbln_custom_ops"
"""The compiler's own kernels. Caches are [blocks, 2, kv_heads, 1, block, head_size]."""
TRITON: Final[Namespace] = "rbln_triton_ops"
"""Kernels written in Triton. Caches are [2, blocks, kv_heads, 1, block, head_size], integers int32."""

_TYPES: Final = {
    "kv_cache": "Tensor(a!)",
    "window_size": "int",
    "is_causal": "bool",
    "attn_mask": "Tensor?",
    "sinks": "Tensor?",
    "k_quantize_scale": "Tensor?",
    "v_quantize_scale": "Tensor?",
    "cache_dtype": "ScalarType?",
}
_DEFAULTS: Final = {"is_causal": "True"}


@dataclass(frozen=True)
class Argument:
    """An argument of an operator."""

    role: str
    """The argument's meaning; the same in every operator."""
    name: str
    """Its name in the schema."""

    @property
    def schema(self) -> str:
        """The argument's part of the operator's schema."""
        kind = _TYPES.get(self.role, "Tensor")
        default = _DEFAULTS.get(self.role, "None" if kind.endswith("?") else "")
        return f"{kind} {self.name}={default}" if default else f"{kind} {self.name}"


_STATES: Final = "q k v kv_cache"
# The arguments after the states: first those of both namespaces, then those of the custom operators only.
_FULL: Final = {
    "flash_causal_attention_naive": ("scale seq_idx block_tables dummy", "sinks k_quantize_scale v_quantize_scale cache_dtype"),
    "causal_attention_naive": ("seq_idx scale block_tables dummy", "sinks"),
    "flash_attention_naive": ("mask scale seq_idx block_tables dummy", "sinks"),
    "attention_naive": ("mask seq_idx scale block_tables dummy", "sinks"),
}  # fmt: skip
_WINDOW: Final = "cache_seq_len cache_offset scale block_tables dummy"
_TRITON_NAMES: Final = {
    "q": "query",
    "k": "key",
    "v": "value",
    "scale": "qk_scale",
    "block_tables": "block_table",
}


def _arguments(namespace: Namespace, operator: str, roles: str) -> tuple[Argument, ...]:
    names = dict(_TRITON_NAMES) if namespace == TRITON else {}
    if namespace == TRITON and operator.startswith("flash"):
        names["dummy"] = "dummy0"
    return tuple(Argument(role, names.get(role, role)) for role in roles.split())


def _operators(namespace: Namespace) -> dict[str, tuple[Argument, ...]]:
    roles: dict[str, str] = {}
    for operator, (shared, custom) in _FULL.items():
        for phase in ("prefill", "decode"):
            extra = f" {custom}" if namespace == CUSTOM else ""
            roles[f"{operator}_{phase}"] = f"{_STATES} {shared}{extra}"
    for phase, custom in (("prefill", " sinks"), ("decode", " attn_mask sinks")):
        extra = custom if namespace == CUSTOM else ""
        roles[f"sliding_window_attention_naive_{phase}"] = f"{_STATES} {_WINDOW}{extra}"
    if namespace == CUSTOM:
        roles["sliding_window_attention_v1"] = (
            f"{_STATES} seq_idx scale block_tables window_size is_causal attn_mask sinks"
        )
    return {operator: _arguments(namespace, operator, names) for operator, names in roles.items()}


SIGNATURES: Final[dict[Namespace, dict[str, tuple[Argument, ...]]]] = {
    CUSTOM: _operators(CUSTOM),
    TRITON: _operators(TRITON),
}
"""By namespace and operator, the arguments in order."""
NAMESPACES: Final = tuple(SIGNATURES)


def schema(namespace: Namespace, operator: str) -> str:
    """Returns the operator's schema in torch's syntax."""
    arguments = ", ".join(argument.schema for argument in SIGNATURES[namespace][operator])
    return f"{operator}({arguments}) -> Tensor"
