"""Checks the shapes and types of the operators' arguments, which a compiler would report late or never."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from worker_svc.devices.rbln.ops.signatures import TRITON, Namespace

_INDICES = ("seq_idx", "block_tables", "cache_seq_len", "cache_offset")


def check(namespace: Namespace, operator: str, by_role: Mapping[str, Any]) -> None:
    """Refuses arguments that no kernel takes. Checks shapes and types only, never the tensors' contents.

    Raises:
        ValueError: names the operator, the argument and its expected shape.
    """
    query: torch.Tensor = by_role["q"]

    def expect(role: str, what: str, holds: bool) -> None:
        if not holds:
            value = by_role[role]
            found = f"{list(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)
            raise ValueError(f"{namespace}::{operator}: {role} must be {what}, got {found}")

    expect("q", "[batch, kv_heads, groups, q_len, head_size]", query.dim() == 5)
    batch, kv_heads, groups, query_len, head_size = query.shape
    state = (batch, kv_heads, 1, query_len, head_size)
    for role in ("k", "v"):
        expect(role, f"{list(state)} {query.dtype}", by_role[role].shape == state)
    cache: torch.Tensor = by_role["kv_cache"]
    layout = "2, blocks" if namespace == TRITON else "blocks, 2"
    two = 0 if namespace == TRITON else 1
    expect(
        "kv_cache",
        f"[{layout}, {kv_heads}, 1, block, {head_size}]",
        cache.dim() == 6
        and cache.shape[two] == 2
        and cache.shape[2:4] == (kv_heads, 1)
        and cache.shape[5] == head_size,
    )
    expect("scale", "a scalar tensor", by_role["scale"].dim() == 0)
    prefill = operator.endswith("_prefill") or (not operator.endswith("_decode") and query_len > 1)
    if prefill:
        expect("q", "of batch 1", batch == 1)
    else:
        expect("q", "of one token a row", query_len == 1)
    _check_positions(namespace, operator, by_role, expect, prefill=prefill)
    if "mask" in by_role:
        mask: torch.Tensor = by_role["mask"]
        expect(
            "mask",
            f"[1 or {batch}, 1, 1, {query_len}, max_model_len]",
            mask.dim() == 5 and mask.shape[0] in (1, batch) and mask.shape[1:4] == (1, 1, query_len),
        )
    if by_role.get("sinks") is not None:
        sinks: torch.Tensor = by_role["sinks"]
        expect(
            "sinks",
            f"[{kv_heads * groups}, sinks]",
            sinks.dim() == 2 and sinks.shape[0] == kv_heads * groups,
        )
    _check_has_reference(namespace, operator, by_role)


def _check_positions(
    namespace: Namespace,
    operator: str,
    by_role: Mapping[str, Any],
    expect: Callable[[str, str, bool], None],
    *,
    prefill: bool,
) -> None:
    """Checks the block tables and positions, which say where a step's tokens go."""
    batch = by_role["q"].shape[0]
    tables: torch.Tensor = by_role["block_tables"]
    in_place = "cache_seq_len" in by_role
    if prefill:
        expect("block_tables", "[1]" if in_place else "[partitions]", tables.dim() == 1)
    else:
        expect("block_tables", f"[{batch}, partitions]", tables.dim() == 2 and tables.shape[0] == batch)
    if in_place or operator.startswith(("causal", "attention")):
        expect("block_tables", "of one partition", tables.shape[-1] == 1)
    for role in ("seq_idx", "cache_seq_len", "cache_offset"):
        if role in by_role:
            expect(role, f"[{batch}, 1]", by_role[role].shape == (batch, 1))
    for role in _INDICES:
        if role in by_role:
            integers = (torch.int32,) if namespace == TRITON else (torch.int32, torch.int64)
            expect(role, " or ".join(map(str, integers)), by_role[role].dtype in integers)


def _check_has_reference(namespace: Namespace, operator: str, by_role: Mapping[str, Any]) -> None:
    """Refuses options that the reference does not implement."""
    unsupported = {
        "an 8-bit KV cache": by_role.get("cache_dtype") is not None,
        "attention without causality": not by_role.get("is_causal", True),
        "a mask over paged blocks": "window_size" in by_role and by_role.get("attn_mask") is not None,
    }
    for what, needed in unsupported.items():
        if needed:
            raise ValueError(f"{namespace}::{operator} has no reference for {what}")
