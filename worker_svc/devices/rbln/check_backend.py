"""Backend ``rbln-check``: an NPU's place, taken by a CPU that runs the very graph and is as strict about it as a compiler would be.

What ``torch.compile`` captured is traced down to ATen and the attention operators, in order and without making mutations functional.
A graph with a dynamic shape or with an operator that is not on the list is refused. Like the NPU, the backend owns the KV cache where the
host's tensors are mere handles on the meta device.
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
from worker_svc.devices.rbln.ops.signatures import NAMESPACES

# What decoder layers, norms, rotary embeddings, MLPs and output heads are made of. All of it has a result whose shape follows from shapes.
ALLOWED_ATEN: Final = frozenset(
    [
        "_softmax",
        "_to_copy",
        "_unsafe_view",
        "abs",
        "add",
        "addmm",
        "alias",
        "amax",
        "any",
        "arange",
        "argmax",
        "baddbmm",
        "bitwise_and",
        "bitwise_not",
        "bitwise_or",
        "bmm",
        "cat",
        "clamp",
        "clamp_max",
        "clamp_min",
        "clone",
        "constant_pad_nd",
        "copy_",
        "cos",
        "cumsum",
        "detach",
        "div",
        "embedding",
        "empty",
        "empty_like",
        "eq",
        "exp",
        "expand",
        "fill_",
        "full",
        "full_like",
        "gather",
        "ge",
        "gelu",
        "gt",
        "index",
        "index_select",
        "le",
        "lift_fresh_copy",
        "linear",
        "logical_and",
        "logical_not",
        "logical_or",
        "lt",
        "masked_fill",
        "matmul",
        "max",
        "maximum",
        "mean",
        "minimum",
        "mm",
        "mul",
        "ne",
        "neg",
        "new_empty",
        "new_full",
        "new_zeros",
        "one_hot",
        "ones",
        "ones_like",
        "permute",
        "pow",
        "reciprocal",
        "relu",
        "repeat",
        "reshape",
        "rsqrt",
        "scalar_tensor",
        "scatter",
        "select",
        "sigmoid",
        "silu",
        "sin",
        "slice",
        "sort",
        "split",
        "split_with_sizes",
        "sqrt",
        "squeeze",
        "stack",
        "sub",
        "sum",
        "t",
        "tanh",
        "to",
        "topk",
        "transpose",
        "unbind",
        "unsqueeze",
        "view",
        "where",
        "zeros",
        "zeros_like",
    ]
)


class MetaMemory:
    """Memory of the device, behind tensors on the meta device that stand for it on the host."""

    def __init__(self) -> None:
        """Empty."""
        self._real: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._real)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed memory; the tensor is on the meta device, and the memory lives as long as it."""
        handle = torch.empty(shape, dtype=dtype, device="meta")
        key = _storage(handle)
        self._real[key] = torch.zeros(shape, dtype=dtype)
        weakref.finalize(handle, self._real.pop, key, None)
        return handle

    def resolve(self, tensor: torch.Tensor) -> torch.Tensor:
        """The memory behind a tensor of :meth:`allocate` or a view of one; any other tensor is itself.

        Raises:
            KeyError: for a tensor on the meta device with no memory behind it.
        """
        if not tensor.is_meta:
            return tensor
        real = self._real[_storage(tensor)]
        return real.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - what identifies a storage without memory


class CheckBackend:
    """What ``torch.compile`` is given as its backend.

    Attributes:
        graphs: those that it has accepted, in the order in which they came.
        folder: where to leave them as text, if anywhere.
    """

    def __init__(self, memory: MetaMemory) -> None:
        """With the memory of the device."""
        self._memory = memory
        self.graphs: list[fx.GraphModule] = []
        self.folder: Path | None = None

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Checks a graph.

        Raises:
            ConfigurationRefused: naming what is dynamic or not lowered.
        """
        for value in inputs:
            if _is_dynamic(value) or not isinstance(value, torch.Tensor):
                raise ConfigurationRefused(f"rbln-check: the graph has a dynamic input ({_shown(value)})")
        graph = _trace(module, inputs)
        check_graph(graph)
        self.graphs.append(graph)
        if self.folder is not None:
            path = self.folder / f"graph-{len(self.graphs)}.txt"
            if not path.exists():  # an entry that is complete is not written to
                path.write_text(graph.code, encoding="utf-8")
        resolve = self._memory.resolve

        def run(*arguments: Any) -> Any:
            return graph(*map(resolve, arguments))

        return run


def _trace(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The graph in ATen, of static shapes; nodes remember the lines of the model that they come from."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode, torch.no_grad(), fx.traceback.preserve_node_meta():
            fakes = [mode.from_tensor(value, static_shapes=True) for value in inputs]
            return make_fx(fx.Interpreter(module).run)(*fakes)
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        name = str(error.func).removesuffix(".default").replace(".", "::", 1)
        raise ConfigurationRefused(
            f"rbln-check: what {name} gives depends on values, not on shapes alone"
        ) from error


def check_graph(graph: fx.GraphModule) -> None:
    """Refuses whatever a static graph for the NPU may not have.

    Raises:
        ConfigurationRefused: naming the first such thing and where in the model it comes from.
    """
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            _check_static(node)
            continue
        if node.op != "call_function":
            raise ConfigurationRefused(f"rbln-check: {node.op} {node.target} is not lowered{_where(node)}")
        if node.target is operator.getitem:
            continue
        if not isinstance(node.target, torch._ops.OpOverload):  # noqa: SLF001 - the public class has no public name
            raise ConfigurationRefused(f"rbln-check: {node.target} is not lowered{_where(node)}")
        namespace, _, name = node.target._schema.name.partition("::")  # noqa: SLF001 - nor has an operator's schema
        if namespace not in NAMESPACES and not (namespace == "aten" and name in ALLOWED_ATEN):
            raise ConfigurationRefused(
                f"rbln-check: operator {namespace}::{name} is not lowered{_where(node)}"
            )
        _check_static(node)


def _check_static(node: fx.Node) -> None:
    values = node.meta.get("val")
    for value in values if isinstance(values, (list, tuple)) else [values]:
        if _is_dynamic(value):
            raise ConfigurationRefused(f"rbln-check: {node.name} is dynamic ({_shown(value)}){_where(node)}")


def _is_dynamic(value: Any) -> bool:
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
