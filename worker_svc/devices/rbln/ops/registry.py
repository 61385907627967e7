"""Makes torch operators of the references, and calls operators with their arguments in the right order."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from worker_svc.devices.rbln.ops import reference
from worker_svc.devices.rbln.ops.checks import check
from worker_svc.devices.rbln.ops.signatures import SIGNATURES, TRITON, Namespace, schema


@functools.cache
def register() -> tuple[torch.library.Library, ...]:
    """Registers every operator that nobody else has registered, with a reference and a fake of each. Once per process.

    Returns:
        What keeps them registered.
    """
    libraries = []
    for namespace, operators in SIGNATURES.items():
        library = torch.library.Library(namespace, "FRAGMENT")
        for operator in operators:
            if hasattr(getattr(torch.ops, namespace), operator):
                continue  # the vendor's
            library.define(schema(namespace, operator))
            library.impl(operator, _reference(namespace, operator), "CPU")
            torch.library.register_fake(
                f"{namespace}::{operator}", _fake(namespace, operator), lib=library, allow_override=False
            )
        libraries.append(library)
    return tuple(libraries)


def emit(namespace: Namespace, operator: str, by_role: Mapping[str, Any]) -> torch.Tensor:
    """Calls an operator.

    Args:
        namespace: whose.
        operator: with its ``_prefill`` or ``_decode``.
        by_role: its arguments; those that may be missing become ``None``.

    Returns:
        Its result [batch, kv_heads, groups, q_len, head_size].
    """
    arguments = [by_role.get(argument.role) for argument in SIGNATURES[namespace][operator]]
    result: torch.Tensor = getattr(getattr(torch.ops, namespace), operator)(*arguments)
    return result


def _by_role(namespace: Namespace, operator: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    # Arguments that equal their defaults are left out by torch.
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
