"""A step of attention on the device, compared with the CPU: it finds a broken driver or compiler."""

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.checks.check_results import CheckFailed, Note, Report

if TYPE_CHECKING:
    import torch

    from worker_svc.devices.base import Device

_HEADS, _KV_HEADS, _HEAD_SIZE = 4, 2, 64
# Kernels in half precision stay well below this; a wrong kernel does not.
_TOLERANCE = 0.05


def check(device: "Device", report: Report, *, runs: bool) -> "torch.dtype | None":
    """Runs all checks; without `runs`, programs are compiled for a device that is not here.

    Returns:
        The type in which the device's own compiler computes float32; `None` if unknown.
    """
    found: list[torch.dtype] = []
    report.check("attention", lambda: _attention(device, runs=runs))
    if device.has_own_compiler and runs:
        report.check("precision", lambda: _precision(device, found), needs=("attention",))
    if device.has_own_compiler:
        report.check("kept code", lambda: _kept_code(device), needs=("attention",))
    return next(iter(found), None)


def _attention(device: "Device", *, runs: bool) -> str:
    """Compiles and runs paged attention for the first token of a sequence, in block 1."""
    import torch
    from torch.nn import functional

    from worker_svc.devices.attention import AttentionCall, AttentionParams, PagedInput
    from worker_svc.shapes import AttentionLayer, KvGroup

    layer = AttentionLayer("layer", _HEADS, _KV_HEADS, _HEAD_SIZE, 0, torch.float32)
    group, size = KvGroup(0, (layer,)), device.default_block_size
    params = AttentionParams(_HEADS, _KV_HEADS, _HEAD_SIZE, _HEAD_SIZE**-0.5, 0, 0.0, writes=True)
    device.check_attention(params)
    cache = device.allocate((1, *device.cache_shape(group, 4, size)), torch.float32)[0]

    def integers(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device.torch_device)

    step = PagedInput(
        seq_lens=integers([1]),
        query_start=integers([0, 1]),
        block_table=integers([1, 2]).view(1, 2),
        slot_mapping=integers([size], torch.int64),
        num_tokens=1,
    )
    plan = device.plan(group, size, step)
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
    difference = float((result.float() - expected).abs().max())
    if not difference <= _TOLERANCE:  # also catches NaN
        raise CheckFailed(f"{difference:.2g} off the CPU's result; update the compiler, or report this")
    return f"made and run in {seconds:.1f} s, differs from the CPU by {difference:.1g}"


def _precision(device: "Device", found: "list[torch.dtype]") -> str:
    """Adds the type in which the device computes float32: the compiler of NPUs chooses it by the chip."""
    import torch

    # The first needs the digits of float32; the second, more than those of bfloat16.
    values = torch.tensor([1 + 2**-20, 1 + 2**-9]).repeat(8, 32)
    with torch.inference_mode():
        product = device.compile(lambda left, right: left * right)(values, torch.ones_like(values)).cpu()
    fine, coarse = (float(product[0, place]) for place in range(2))
    found.append(torch.float32 if fine != 1 else torch.float16 if coarse != 1 else torch.bfloat16)
    return f"float32 is computed in {str(found[0]).removeprefix('torch.')}"


def _kept_code(device: "Device") -> str:
    """Compiles a graph with a folder for its code."""
    import torch

    with tempfile.TemporaryDirectory(prefix="triptych-code-") as folder:
        device.use_code_folder(Path(folder))
        with torch.inference_mode():
            device.compile(lambda states: states * 2)(torch.ones(8, 64))
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        device.use_code_folder(None)
    if not files:
        raise Note("the compiler wrote no file for a graph: every start compiles again; report this")
    return f"{len(files)} file{'s' if len(files) > 1 else ''} for a graph, kept for later starts"
