"""Registers the references as torch operators and calls operators with arguments in the right order."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from worker_svc.devices.rbln.ops import argmax, experts, reference
from worker_svc.devices.rbln.ops.checks import check
from worker_svc.devices.rbln.ops.signatures import CUSTOM, SIGNATURES, TRITON, Namespace, schema

# Keeps the operators registered.
_LIBRARIES: list[torch.library.Library] = []


def register_all() -> None:
    """Registers the references of all operators that exist nowhere else."""
    for namespace, operators in SIGNATURES.items():
        register(namespace, operators)
    argmax.register()


def register(namespace: Namespace, operators: Iterable[str]) -> None:
    """Registers a reference and a fake for each operator that is not registered yet.

    The operator for expert layers belongs to the compiler's own kernels.
    """
    library = torch.library.Library(namespace, "FRAGMENT")
    for operator in operators:
        if hasattr(getattr(torch.ops, namespace), operator):
            continue  # the vendor's own, or registered before
        library.define(schema(namespace, operator))
        library.impl(operator, _reference(namespace, operator), "CPU")
        torch.library.register_fake(
            f"{namespace}::{operator}", _fake(namespace, operator), lib=library, allow_override=False
        )
    if namespace == CUSTOM:
        experts.register(library)
    _LIBRARIES.append(library)


def emit(namespace: Namespace, operator: str, by_role: Mapping[str, Any]) -> torch.Tensor:
    """Calls an operator.

    Args:
        namespace: the operator's.
        operator: its name, with its `_prefill` or `_decode`.
        by_role: its arguments; missing ones become `None`.

    Returns:
        The operator's result [batch, kv_heads, groups, q_len, head_size].
    """
    arguments = [by_role.get(argument.role) for argument in SIGNATURES[namespace][operator]]
    result: torch.Tensor = getattr(getattr(torch.ops, namespace), operator)(*arguments)
    return result


def _by_role(namespace: Namespace, operator: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    # torch omits arguments that equal their defaults.
    return {
        argument.role: value
        for argument, value in zip(SIGNATURES[namespace][operator], arguments, strict=False)
    }


def _fake(namespace: Namespace, operator: str) -> Callable[..., torch.Tensor]:
    def fake(*arguments: Any) -> torch.Tensor:
        by_role = _by_role(namespace, operator, arguments)
        check(namespace, operator, by_role)
        query: torch.Tensor = by_role["q"]
        return query.new_empty(query.shape)

    return fake


def _reference(namespace: Namespace, operator: str) -> Callable[..., torch.Tensor]:
    def run(*arguments: Any) -> torch.Tensor:
        given = _by_role(namespace, operator, arguments)
        check(namespace, operator, given)
        cache: torch.Tensor = given["kv_cache"]
        if namespace == TRITON:
            cache = cache.transpose(0, 1)
        query, key, value, scale, tables = (given[role] for role in ("q", "k", "v", "scale", "block_tables"))
        sinks = given.get("sinks")
        if "cache_seq_len" in given:
            return reference.sliding(
                query, key, value, cache, given["cache_seq_len"], given["cache_offset"], scale, tables,
                mask=given.get("attn_mask"), sinks=sinks,
            )  # fmt: skip
        return reference.paged(
            query, key, value, cache, scale, given["seq_idx"], tables,
            mask=given.get("mask"), window=given.get("window_size", 0), sinks=sinks,
        )  # fmt: skip

    return run
