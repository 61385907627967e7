"""Backend `rbln-check`: a CPU in place of an NPU, which holds graphs to the rules of its compiler.

Graphs have static shapes and operators on a list; the tests' fake of the vendor's packages uses the same
rules. Like the NPU's runtime, the backend owns the KV cache; the host gets handles on the meta device.
"""

import operator
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import make_fx

from protos.errors import ConfigurationRefused
from worker_svc.devices.rbln.operators import ARGMAX, NAMESPACES, SAMPLER_NAMESPACE, TOP_K_TOP_P

# The operators of decoder and encoder layers, norms, rotary embeddings, MLPs, pooling and output heads. Their
# results' shapes depend only on shapes.
ALLOWED_ATEN: Final = frozenset(
    [
        "_softmax", "_to_copy", "_unsafe_view", "abs", "add", "addmm", "alias", "amax", "any", "arange",
        "argmax", "baddbmm", "bitwise_and", "bitwise_not", "bitwise_or", "bmm", "cat", "clamp", "clamp_max",
        "clamp_min", "clone", "constant_pad_nd", "copy_", "cos", "cumsum", "detach", "div", "embedding",
        "empty", "empty_like", "eq", "exp", "expand", "fill_", "full", "full_like", "gather", "ge", "gelu",
        "gt", "index", "index_select", "le", "lift_fresh_copy", "linear", "logical_and", "logical_not",
        "logical_or", "lt", "masked_fill", "masked_fill_", "matmul", "max", "maximum", "mean", "minimum",
        "mm", "mul", "mul_", "native_layer_norm", "ne", "neg", "new_empty", "new_full", "new_zeros",
        "one_hot", "ones", "ones_like", "permute", "pow", "reciprocal", "relu", "repeat", "reshape", "rsqrt",
        "scalar_tensor", "scatter", "select", "sigmoid", "silu", "sin", "slice", "sort", "split",
        "split_with_sizes", "sqrt", "squeeze", "stack", "sub", "sum", "t", "tanh", "to", "topk", "transpose",
        "unbind", "unsqueeze", "view", "where", "zeros", "zeros_like",
    ]
)  # fmt: skip


# Collectives as Dynamo writes them: each names its process group, which the compiler is told besides.
ALLOWED_COLLECTIVES: Final = frozenset(["all_reduce", "all_gather_into_tensor", "wait_tensor"])

_ALLOWED: Final = {
    "aten": ALLOWED_ATEN,
    "_c10d_functional": ALLOWED_COLLECTIVES,
    SAMPLER_NAMESPACE: frozenset([ARGMAX, TOP_K_TOP_P]),
}


class NotLowered(ValueError):  # noqa: N818 - a property of the graph
    """The graph contains an unsupported part. The text names it and its line in the model."""


def trace(module: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """Traces a captured graph to ATen, in order and with mutations, and checks it.

    Nodes keep the model's source lines.

    Raises:
        NotLowered: names the first input, operator or shape that is not static or not on the list.
    """
    for value in inputs:
        if is_dynamic(value) or not isinstance(value, torch.Tensor):
            raise NotLowered(f"the graph has a dynamic input ({_shown(value)})")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode, torch.no_grad(), fx.traceback.preserve_node_meta():
            fakes = [mode.from_tensor(value, static_shapes=True) for value in inputs]
            graph = make_fx(fx.Interpreter(module).run)(*fakes)
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        name = str(error.func).removesuffix(".default").replace(".", "::", 1)
        raise NotLowered(f"the result of {name} depends on values, not only on shapes") from error
    check_graph(graph)
    return graph


def check_graph(graph: fx.GraphModule) -> None:
    """Refuses dynamic shapes and operators unknown to the NPU.

    Raises:
        NotLowered: names the first violation and its line in the model.
    """
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            _check_static(node)
            continue
        if node.op != "call_function":
            raise NotLowered(f"{node.op} {node.target} is not lowered{_where(node)}")
        if node.target is operator.getitem:
            continue
        if not isinstance(node.target, torch._ops.OpOverload):  # noqa: SLF001
            raise NotLowered(f"{node.target} is not lowered{_where(node)}")
        namespace, _, name = node.target._schema.name.partition("::")  # noqa: SLF001
        if namespace not in NAMESPACES and name not in _ALLOWED.get(namespace, ()):
            raise NotLowered(f"operator {namespace}::{name} is not lowered{_where(node)}")
        _check_static(node)


def _check_static(node: fx.Node) -> None:
    values = node.meta.get("val")
    for value in values if isinstance(values, (list, tuple)) else [values]:
        if is_dynamic(value):
            raise NotLowered(f"{node.name} is dynamic ({_shown(value)}){_where(node)}")


def is_dynamic(value: Any) -> bool:
    """Whether a graph's value has a symbolic size."""
    if isinstance(value, torch.Tensor):
        return any(not isinstance(size, int) for size in value.shape)
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _shown(value: Any) -> str:
    return (
        f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"{type(value).__name__} {value}"
    )


def _where(node: fx.Node) -> str:
    lines = [
        line.strip() for line in (node.stack_trace or "").splitlines() if line.strip().startswith("File ")
    ]
    return f" ({lines[-1]})" if lines else ""


class MetaMemory:
    """The device's memory. The host refers to it by tensors on the meta device."""

    def __init__(self) -> None:
        """Starts empty."""
        self._real: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._real)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocates zeroed memory that lives as long as the returned tensor on the meta device."""
        handle = torch.empty(shape, dtype=dtype, device="meta")
        key = _storage(handle)
        self._real[key] = torch.zeros(shape, dtype=dtype)
        weakref.finalize(handle, self._real.pop, key, None)
        return handle

    def resolve(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the memory of a tensor of `allocate` or of a view of it; other tensors unchanged.

        Raises:
            KeyError: for a meta tensor without memory.
        """
        if not tensor.is_meta:
            return tensor
        real = self._real[_storage(tensor)]
        return real.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - identifies a storage that has no memory


class CheckBackend:
    """The backend that `torch.compile` calls."""

    graphs: list[fx.GraphModule]
    """The accepted graphs, in order."""
    folder: Path | None
    """Where to store graphs as text; `None` to store none."""

    def __init__(self, memory: MetaMemory) -> None:
        """Uses the given memory of the device."""
        self._memory = memory
        self.graphs = []
        self.folder = None

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Checks a graph and returns a function that runs it.

        Raises:
            ConfigurationRefused: names the dynamic or unlowered part.
        """
        try:
            graph = trace(module, inputs)
        except NotLowered as error:
            raise ConfigurationRefused(f"rbln-check: {error}") from error
        self.graphs.append(graph)
        if self.folder is not None:
            path = self.folder / f"graph-{len(self.graphs)}.txt"
            if not path.exists():  # complete cache entries are read-only
                path.write_text(graph.code, encoding="utf-8")
        resolve = self._memory.resolve

        def run(*arguments: Any) -> Any:
            return graph(*map(resolve, arguments))

        return run
