"""Checks that every device must pass, through the interface that the worker uses."""

import time
from typing import TYPE_CHECKING

from deploy.diagnosis.findings import Missing, Remark

if TYPE_CHECKING:
    import torch

    from worker_svc.devices.attention import AttentionParams, PagedInput
    from worker_svc.devices.base import Device
    from worker_svc.shapes.geometry import KvGroup

_GIB = 2**30
_HIDDEN, _ROWS = 128, 8
_HEADS, _KV_HEADS, _HEAD_SIZE = 4, 2, 64
_BLOCKS = 4
# Kernels in half precision stay well below this; a wrong kernel does not.
_TOLERANCE = 0.05


def memory(device: "Device") -> str:
    """Returns the free memory.

    Raises:
        Missing: if there is none.
    """
    free = device.free_memory()
    if free <= 0:
        raise Missing("no memory is free; stop what else runs on the device")
    return f"{free / _GIB:.3g} GiB free for weights, graphs and KV cache"


def tensors(device: "Device") -> str:
    """Copies a tensor to the device and back.

    Raises:
        Missing: if it comes back changed.
    """
    import torch

    sent = torch.arange(1024, dtype=torch.float32)
    (memory,) = device.allocate((1, *sent.shape), sent.dtype)
    if memory.is_meta:
        return "the runtime owns the memory; the host has handles"
    memory.copy_(sent)
    if not torch.equal(memory.cpu(), sent):
        raise Missing("a tensor came back with other values; reinstall the driver")
    return f"copied to {memory.device.type} and back"


def copies(device: "Device") -> str:
    """Copies a block of a KV cache over another.

    Raises:
        Remark: if the device cannot copy blocks, or only while a model runs.
        Missing: if the copy differs.
    """
    import torch

    group = _group()
    how = device.block_copies([group])
    if how == "none":
        raise Remark(
            "blocks cannot be copied: prefixes are reused by whole blocks, and n > 1 prefills every sequence"
        )
    if how == "runtime":
        raise Remark("the runtime of a compiled model copies blocks; a worker finds out while it warms up")
    cache = device.allocate(
        (1, *device.cache_shape(group, _BLOCKS, device.default_block_size)), torch.float32
    )
    if cache.is_meta:
        return "blocks are copied in the memory behind the host's handles"
    dimension = 1 + device.block_dim
    cache.select(dimension, 1).fill_(7.0)
    device.copy_block([cache], 1, 2, device.default_block_size)
    if not bool((cache.cpu().select(dimension, 2) == 7.0).all()):
        raise Missing("a copied block has other values than its source; reinstall the driver")
    return f"a block of {device.default_block_size} tokens copied with {how}"


def graph(device: "Device", *, runs: bool) -> str:
    """Compiles a small MLP for the device, runs it, and compares the result with the CPU's.

    Args:
        device: the device.
        runs: False where the device only compiles.

    Raises:
        Missing: if the results differ.
    """
    import torch
    from torch.nn import functional

    generator = torch.Generator().manual_seed(0)
    up, down = (torch.randn(_HIDDEN, _HIDDEN, generator=generator) / _HIDDEN**0.5 for _ in range(2))
    hidden = torch.randn(_ROWS, _HIDDEN, generator=generator)
    model = torch.nn.ParameterList([up.clone(), down.clone()]).to(device.torch_device).requires_grad_(False)
    device.place_weights(model)

    def mlp(states: torch.Tensor) -> torch.Tensor:
        normed = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-6)
        return functional.linear(functional.silu(functional.linear(normed, model[0])), model[1])

    started = time.monotonic()
    with torch.inference_mode():
        result = device.compile(mlp)(hidden.to(device.torch_device)).cpu()
    seconds = time.monotonic() - started
    if not runs:
        return f"compiled in {seconds:.1f} s; not run"
    normed = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
    expected = functional.linear(functional.silu(functional.linear(normed, up)), down)
    return f"made and run in {seconds:.1f} s, {_compared(result, expected)}"


def attention(device: "Device", *, runs: bool) -> str:
    """Compiles one decode step of paged attention, runs it, and compares the result with the CPU's.

    Args:
        device: the device.
        runs: False where the device only compiles.

    Raises:
        Missing: if the results differ.
    """
    import torch
    from torch.nn import functional

    from worker_svc.devices.attention import AttentionCall

    group, params, step = _group(), _params(), _first_token(device)
    device.check_attention(params)
    shape = device.cache_shape(group, _BLOCKS, device.default_block_size)
    cache = device.allocate((1, *shape), torch.float32)[0]
    plan = device.plan(group, device.default_block_size, step)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, _HEADS, _HEAD_SIZE, generator=generator)
    key, value = (torch.randn(1, _KV_HEADS, _HEAD_SIZE, generator=generator) for _ in range(2))

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(query)
        device.attend(AttentionCall(params, query, key, value, cache, output), plan)
        return output

    started = time.monotonic()
    with torch.inference_mode():
        result = device.compile(attend)(*(each.to(device.torch_device) for each in (query, key, value))).cpu()
    seconds = time.monotonic() - started
    if not runs:
        return f"compiled in {seconds:.1f} s; not run"
    expected = functional.scaled_dot_product_attention(
        query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), enable_gqa=True
    ).transpose(0, 1)
    return f"made and run in {seconds:.1f} s, {_compared(result, expected)}"


def _compared(result: "torch.Tensor", expected: "torch.Tensor") -> str:
    difference = float((result.float() - expected).abs().max())
    if not difference <= _TOLERANCE:  # also catches NaN
        raise Missing(
            f"the result differs from the CPU's by {difference:.2g}; update the compiler, or report this"
        )
    return f"differs from the CPU by {difference:.1g}"


def _group() -> "KvGroup":
    import torch

    from worker_svc.shapes.geometry import AttentionLayer, KvGroup

    return KvGroup(0, (AttentionLayer("layer", _HEADS, _KV_HEADS, _HEAD_SIZE, 0, torch.float32),))


def _params() -> "AttentionParams":
    from worker_svc.devices.attention import AttentionParams

    return AttentionParams(_HEADS, _KV_HEADS, _HEAD_SIZE, _HEAD_SIZE**-0.5, 0, 0.0, writes=True)


def _first_token(device: "Device") -> "PagedInput":
    """The decode step of a sequence's first token, in block 1 of two."""
    import torch

    from worker_svc.devices.attention import PagedInput

    def integers(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device.torch_device)

    return PagedInput(
        seq_lens=integers([1]),
        query_start=integers([0, 1]),
        block_table=integers([1, 2]).view(1, 2),
        slot_mapping=integers([device.default_block_size], torch.int64),
        num_tokens=1,
    )
