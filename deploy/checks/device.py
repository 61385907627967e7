"""Small programs on the device, compared with the CPU: they find broken drivers, compilers and operators."""

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.checks.check_results import CheckFailed, Note, Report

if TYPE_CHECKING:
    import torch

    from worker_svc.devices import Device
    from worker_svc.shapes.geometry import KvGroup

_HIDDEN, _ROWS = 128, 8
_HEADS, _KV_HEADS, _HEAD_SIZE = 4, 2, 64
_BLOCKS = 4
# Kernels in half precision stay well below this; a wrong kernel does not.
_TOLERANCE = 0.05


def check(device: "Device", report: Report, *, runs: bool) -> None:
    """Runs all checks.

    Args:
        device: the worker's.
        report: gets the results.
        runs: whether the device is here; otherwise programs are only compiled.
    """
    is_npu = device.name == "rbln"
    if is_npu:
        report.check("operators", lambda: _operators(device))
    if runs:
        report.check("copies", lambda: _copies(device))
    report.check("graph", lambda: _graph(device, runs=runs))
    if is_npu:
        report.check("kept code", lambda: _kept_code(device), needs=("graph",))
    report.check("attention", lambda: _attention(device, runs=runs), needs=("graph",))


def _operators(device: "Device") -> str:
    import torch

    from worker_svc.devices.rbln.device import RblnDevice
    from worker_svc.devices.rbln.ops.experts import OPERATOR

    assert isinstance(device, RblnDevice)
    namespace, names = device.namespace, device.operators()
    missing = [name for name in names if not hasattr(getattr(torch.ops, namespace), name)]
    if missing:
        raise CheckFailed(f"{namespace} lacks {', '.join(missing)}; install the versions in docs/npu.md")
    if not hasattr(torch.ops.rbln_custom_ops, OPERATOR):
        raise Note(f"no {OPERATOR}: expert models need VLLM_RBLN_MOE_USE_OPT_KERNEL=0")
    return f"{len(names)} attention operators in {namespace}, and {OPERATOR}"


def _copies(device: "Device") -> str:
    """Writes a block of a KV cache and copies it over another."""
    import torch

    group, size = _group(), device.default_block_size
    how = device.block_copies([group])
    if how == "none":
        raise Note("none: prefixes are reused by whole blocks, and n > 1 prefills every sequence")
    if how == "runtime":
        raise Note("by the runtime of a compiled model; a worker finds out while it warms up")
    cache = device.allocate((1, *device.cache_shape(group, _BLOCKS, size)), torch.float32)
    if cache.is_meta:
        return "in the runtime's memory, of which the host has handles"
    dimension = 1 + device.block_dim
    cache.select(dimension, 1).fill_(7.0)
    device.copy_block([cache], 1, 2, size)
    if not bool((cache.cpu().select(dimension, 2) == 7.0).all()):
        raise CheckFailed("a copied block differs from its source; reinstall the driver")
    return f"a block of {size} tokens in {cache.device.type} memory, with {how}"


def _graph(device: "Device", *, runs: bool) -> str:
    """Compiles and runs an MLP."""
    import torch
    from torch.nn import functional

    generator = torch.Generator().manual_seed(0)
    up, down = (torch.randn(_HIDDEN, _HIDDEN, generator=generator) / _HIDDEN**0.5 for _ in range(2))
    hidden = torch.randn(_ROWS, _HIDDEN, generator=generator)
    model = torch.nn.ParameterList([up.clone(), down.clone()]).to(device.torch_device).requires_grad_(False)
    device.place_weights(model)

    def mlp(states: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        normed = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-6)
        return functional.linear(functional.silu(functional.linear(normed, up)), down)

    started = time.monotonic()
    with torch.inference_mode():
        compiled = device.compile(lambda states: mlp(states, model[0], model[1]))
        result = compiled(hidden.to(device.torch_device)).cpu()
    return _compared(result, mlp(hidden, up, down) if runs else None, started)


def _attention(device: "Device", *, runs: bool) -> str:
    """Compiles and runs paged attention for the first token of a sequence, in block 1."""
    import torch
    from torch.nn import functional

    from worker_svc.devices.attention import AttentionCall, AttentionParams, PagedInput

    group, size = _group(), device.default_block_size
    params = AttentionParams(_HEADS, _KV_HEADS, _HEAD_SIZE, _HEAD_SIZE**-0.5, 0, 0.0, writes=True)
    device.check_attention(params)
    cache = device.allocate((1, *device.cache_shape(group, _BLOCKS, size)), torch.float32)[0]

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
    expected = functional.scaled_dot_product_attention(
        query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), enable_gqa=True
    ).transpose(0, 1)
    return _compared(result, expected if runs else None, started)


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


def _compared(result: "torch.Tensor", expected: "torch.Tensor | None", started: float) -> str:
    seconds = time.monotonic() - started
    if expected is None:
        return f"compiled in {seconds:.1f} s; not run"
    difference = float((result.float() - expected).abs().max())
    if not difference <= _TOLERANCE:  # also catches NaN
        raise CheckFailed(f"{difference:.2g} off the CPU's result; update the compiler, or report this")
    return f"made and run in {seconds:.1f} s, differs from the CPU by {difference:.1g}"


def _group() -> "KvGroup":
    import torch

    from worker_svc.shapes.geometry import AttentionLayer, KvGroup

    return KvGroup(0, (AttentionLayer("layer", _HEADS, _KV_HEADS, _HEAD_SIZE, 0, torch.float32),))
