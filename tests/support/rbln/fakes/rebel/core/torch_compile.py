"""The fake compiler's backend for `torch.compile`: takes whole static graphs and runs them on this host."""

import contextlib
import copy
import ctypes
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed, fx
from torch._C._distributed_c10d import _resolve_process_group
from torch._dynamo.backends.registry import register_backend

import rebel
from rebel import CompileContext
from worker_svc.devices.rbln import operators
from worker_svc.devices.rbln.check_backend import NotLowered, trace
from worker_svc.devices.rbln.operators import SIGNATURES, TRITON

OPTIONS = frozenset(
    [
        "cache_dir", "mode", "compile_context", "num_devices", "model_trace_method", "process_group_dict", "_runtime_holder",
        "use_global_ctx", "global_device_id", "use_static_output", "dtype", "mega_cache_only",
    ]
)  # fmt: skip
"""The options that the plugin passes. torch keeps `guard_filter_fn` for itself."""
MODES = frozenset(["strict", "compile_only"])
# Options of graphs whose caches lie in the runtime's memory.
_CONTEXT_OPTIONS = ("compile_context", "use_global_ctx", "global_device_id")


class Runtime:
    """A compiled graph on device tensors."""

    def __init__(
        self, graph: fx.GraphModule, options: Mapping[str, Any], resolve: Callable[[Any], Any]
    ) -> None:
        """Runs `graph` on what `resolve` finds behind its inputs."""
        self._graph = graph
        self._resolve = resolve
        self._compile_only = "compile_only" in options.get("mode", ())
        self._static_output = bool(options.get("use_static_output"))
        self._outputs: list[torch.Tensor] | None = None
        self.on_device = options.get("model_trace_method") == "export"
        if self.on_device and not self._compile_only:
            _collect_on_npus(graph)

    @torch.no_grad()
    def run(self, *inputs: Any) -> Sequence[torch.Tensor]:
        """Runs the graph. Without an NPU, outputs are what memory holds.

        Raises:
            RuntimeError: names an input that is elsewhere, or a part of a tensor. Also if there is a file
                `FAKE_REBEL_FAULT`, which is removed.
        """
        for index, value in enumerate(inputs):
            _check_input(index, value, on_device=self.on_device)
        with contextlib.suppress(KeyError, FileNotFoundError):
            Path(os.environ["FAKE_REBEL_FAULT"]).unlink()
            raise RuntimeError("rebel: the NPU does not answer")
        run = self._graph if "FAKE_REBEL_TYPE" not in os.environ else _Rounded(self._graph).run
        results = run(*map(self._resolve, inputs))
        device = "rbln" if self.on_device else "cpu"
        if self._outputs is None or not self._static_output:
            self._outputs = [torch.empty_like(each, device=device) for each in results]
        for output, result in zip(self._outputs, results, strict=True):
            if self._compile_only:
                output.copy_(torch.full_like(result, torch.nan if result.is_floating_point() else 0))
            else:
                output.copy_(result)
        return tuple(self._outputs)


class _Rounded(fx.Interpreter):
    """Runs a graph on a chip that computes in type `FAKE_REBEL_TYPE`: rounds each result to it."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Leaves views alone: operators write to them."""
        result = super().call_function(target, args, kwargs)
        if not isinstance(result, torch.Tensor) or not result.is_floating_point() or _is_view(result, args):
            return result
        return result.to(getattr(torch, os.environ["FAKE_REBEL_TYPE"])).to(result.dtype)


def _is_view(result: torch.Tensor, args: Sequence[Any]) -> bool:
    memory = result.untyped_storage().data_ptr()
    return any(
        isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() == memory for each in args
    )


class ContextRuntime(Runtime):
    """A compiled graph whose caches lie in the runtime's memory."""

    def __init__(
        self, graph: fx.GraphModule, options: Mapping[str, Any], context: CompileContext, block_dim: int
    ) -> None:
        """Shares the caches of `context` with its other graphs."""
        super().__init__(graph, options, context.resolve)
        self._context = context
        self._block_dim = block_dim

    def _copy_kv_cache(self, source: int, target: int, num_tokens: int) -> None:
        """Copies the leading tokens of a block in every cache that any graph knows."""
        for cache in self._context.memory.values():
            cache.select(self._block_dim, target)[..., :num_tokens, :] = cache.select(
                self._block_dim, source
            )[..., :num_tokens, :].clone()


@register_backend(name="rbln")
def rbln_backend(
    graph: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compiles a graph that Dynamo captured.

    Raises:
        RuntimeError: names an option, an input, an operator or a shape that the compiler does not take.
    """
    # The vendor's modules declare these; they have no kernels for a CPU.
    operators.register(
        TRITON, (name for name in SIGNATURES[TRITON] if hasattr(torch.ops.rbln_triton_ops, name))
    )
    _check_options(options)
    on_device = options.get("model_trace_method") == "export"
    if "compile_only" not in options["mode"] and rebel.get_npu_name() is None:
        raise RuntimeError("rebel: there is no NPU")
    for index, value in enumerate(example_inputs):
        _check_input(index, value, on_device=on_device)
    try:
        lowered = trace(*_on_host(graph, example_inputs, options.get("compile_context")))
    except NotLowered as error:
        raise RuntimeError(f"rebel: {error}") from error
    _check_groups(lowered, options.get("process_group_dict", {}))
    _use_cache(lowered, example_inputs, options)
    if on_device:
        runtime = Runtime(lowered, options, _host_view)
    else:
        runtime = ContextRuntime(lowered, options, options["compile_context"], 0)
    if (holder := options.get("_runtime_holder")) is not None:
        holder.append(runtime)
    return runtime.run


def _check_options(options: Mapping[str, Any]) -> None:
    if unknown := sorted({*options} - OPTIONS):
        raise RuntimeError(f"rebel: unknown options {', '.join(unknown)}")
    if unknown := sorted({*options["mode"]} - MODES):
        raise RuntimeError(f"rebel: unknown modes {', '.join(unknown)}")
    if options.get("num_devices", 1) < 1:
        raise RuntimeError("rebel: num_devices must be at least 1")
    method = options.get("model_trace_method", "")
    if method not in ("", "export"):
        raise RuntimeError(f"rebel: unknown model_trace_method {method}")
    if method and (given := [name for name in _CONTEXT_OPTIONS if name in options]):
        raise RuntimeError(f"rebel: {given[0]} does not go with model_trace_method export")
    if not method and not isinstance(options.get("compile_context"), CompileContext):
        raise RuntimeError("rebel: graphs without device tensors need a compile_context")
    if not isinstance(options.get("_runtime_holder", []), list):
        raise TypeError("rebel: _runtime_holder must be a list")


def _check_groups(graph: fx.GraphModule, groups: Mapping[str, Sequence[int]]) -> None:
    """Refuses collectives over groups that the options do not describe."""
    for node in graph.graph.nodes:
        if not _is_collective(node):
            continue
        name = node.args[-1]
        if name not in groups:
            raise RuntimeError(f"rebel: {node.name} names group {name}, which process_group_dict lacks")
        if len(groups[name]) != _resolve_process_group(name).size():
            raise RuntimeError(f"rebel: process_group_dict has other ranks for group {name}")


def _is_collective(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") == "_c10d_functional" and len(node.args) > 1


def _collect_on_npus(graph: fx.GraphModule) -> None:
    """Gives the graph's collectives tensors of the NPU; the vendor's group sends a host's through gloo.

    A rank that is compiled alone has no group to exchange anything with.
    """
    for node in graph.graph.nodes:
        if _is_collective(node) and _backend(node.args[-1]) != "fake":
            node.args = (node.target, *node.args)
            node.target = _on_npus
    graph.recompile()


def _backend(group: Any) -> str:
    return str(distributed.get_backend(_resolve_process_group(group)))


def _on_npus(collective: Callable[..., torch.Tensor], tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
    result = collective(tensor.to("rbln"), *arguments)
    return torch.ops._c10d_functional.wait_tensor(result).cpu()  # type: ignore[no-any-return]


def _check_input(index: int, value: Any, *, on_device: bool) -> None:
    if not isinstance(value, torch.Tensor):
        return  # the trace refuses it by name
    allowed = ("rbln",) if on_device else ("cpu", "meta")
    if value.device.type not in allowed:
        raise RuntimeError(f"rebel: input {index} is on {value.device}, not on {' or '.join(allowed)}")
    if value.storage_offset():
        raise RuntimeError(f"rebel: input {index} is a part of a tensor; inputs are whole tensors")


def _host_view(value: Any) -> Any:
    """Returns a tensor of this host on the memory of one of the NPU, which is the host's with the stub."""
    if not isinstance(value, torch.Tensor) or value.device.type != "rbln" or not value.numel():
        return value
    storage = value.untyped_storage()
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=torch.uint8).view(value.dtype)
    return whole.as_strided(value.shape, value.stride(), value.storage_offset())


def _on_host(
    graph: fx.GraphModule, inputs: Sequence[Any], context: CompileContext | None
) -> tuple[fx.GraphModule, list[Any]]:
    """Returns a copy of the graph that runs on this host, and host tensors like its inputs."""
    graph = copy.copy(graph)
    graph.graph = copy.deepcopy(graph.graph)
    resolve = _host_view if context is None else context.resolve
    for node in graph.graph.nodes:
        node.args = fx.node.map_aggregate(node.args, _host_device)
        node.kwargs = fx.node.map_aggregate(node.kwargs, _host_device)
        if node.op == "get_attr":
            owner, _, name = node.target.rpartition(".")
            holder = graph.get_submodule(owner)
            setattr(holder, name, resolve(getattr(holder, name)))
    graph.recompile()
    return graph, [
        torch.empty_like(value, device="cpu") if _is_fake(value) else resolve(value) for value in inputs
    ]


def _is_fake(value: Any) -> bool:
    return isinstance(value, torch._subclasses.FakeTensor)


def _host_device(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "rbln" else value


def _use_cache(graph: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Finds the graph's code in the cache, or compiles it and keeps the code."""
    if "cache_dir" not in options:
        return
    # What was compiled without an NPU is for NPUs.
    modes = [mode for mode in options["mode"] if mode != "compile_only"]
    described = [
        rebel.__version__, graph.code, str([(value.shape, value.dtype) for value in inputs]),
        str([modes, options.get("num_devices"), options.get("model_trace_method")]),
    ]  # fmt: skip
    path = Path(options["cache_dir"]) / f"{hashlib.sha256(repr(described).encode()).hexdigest()[:24]}.rbln"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(graph.code, encoding="utf-8")
