"""A model that times the kernels of its forward pass and its output head, and when its logits are ready."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from worker_svc.graphs.replay import ATTENTION, KernelGraph
from worker_svc.vllm_adapter.model import VllmModel

HEAD: Final = "output head"

# Linear layers: ours on a CPU, vLLM's (oneDNN, and sgl-kernel for small weights), and PyTorch's.
_LINEAR: Final = frozenset({
    HEAD, "triptych_cpu::linear", "_C::onednn_mm", "_C::weight_packed_linear", "aten::linear", "aten::mm", "aten::addmm", "aten::bmm",
})  # fmt: skip


@dataclass
class StepParts:
    """The seconds that each kernel of one step took."""

    by_operator: dict[str, float] = field(default_factory=dict)
    logits_at: float = 0.0
    """When the logits were ready, by ``time.perf_counter``; sampling follows."""

    def add(self, operator: str, seconds: float) -> None:
        """Counts one kernel."""
        self.by_operator[operator] = self.by_operator.get(operator, 0.0) + seconds

    @property
    def attention(self) -> float:
        """Seconds of writing keys and values, and attending."""
        return self.by_operator.get(ATTENTION, 0.0)

    @property
    def linear(self) -> float:
        """Seconds of matrix products, in the layers and the output head."""
        return sum(seconds for operator, seconds in self.by_operator.items() if operator in _LINEAR)

    @property
    def other(self) -> float:
        """Seconds of norms, activations, rotary positions and embedding rows."""
        return sum(self.by_operator.values()) - self.linear - self.attention


_REPLAY: Final = KernelGraph.replay


def time_kernels(parts: StepParts | None, synchronize: Callable[[], None]) -> None:
    """Puts a clock around each kernel of all graphs' replays; `None` takes the clocks away."""

    @torch.inference_mode()
    def replay(graph: KernelGraph, inputs: Sequence[torch.Tensor], plans: Mapping[str, Any]) -> torch.Tensor:
        assert parts is not None
        for static, tensor in zip(graph._inputs, inputs, strict=True):
            static.copy_(tensor)
        synchronize()
        for kernel in graph._kernels:
            given = [plans[layer].plan for layer in kernel.layers]
            started = time.perf_counter()
            kernel.run(*given)
            synchronize()
            parts.add(kernel.name, time.perf_counter() - started)
        return graph._output

    KernelGraph.replay = _REPLAY if parts is None else replay  # type: ignore[assignment, method-assign]


class TimedModel(VllmModel):
    """A model that records the times of its kernels while ``parts`` is set."""

    parts: StepParts | None = None
    """Parts of the running step; ``None`` runs it without clocks."""

    def synchronize(self) -> None:
        """Waits until the device has finished its work."""
        if self._device.torch_device.type == "cuda":
            torch.cuda.synchronize()

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        plans: Mapping[str, Any],
        *adapters: torch.Tensor,
    ) -> torch.Tensor:
        """See the base class."""
        if self.parts is None:
            return super().forward(token_ids, positions, plans, *adapters)
        with _OperatorTimer(self, self.parts) as timer:
            timed = {
                name: dataclasses.replace(plan, device=_TimedDevice(plan.device, timer))
                for name, plan in plans.items()
            }
            return super().forward(token_ids, positions, timed, *adapters)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        started = time.perf_counter()
        logits = super().logits(hidden)
        if self.parts is not None:
            self.synchronize()
            self.parts.logits_at = time.perf_counter()
            self.parts.add(HEAD, self.parts.logits_at - started)
        return logits


class _OperatorTimer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Times the operators of a model's own forward pass; kernels inside attention count as attention."""

    def __init__(self, model: TimedModel, parts: StepParts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._parts = parts
        self._attending = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        started = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        if not self._attending:
            self._model.synchronize()
            self._parts.add(func.name(), time.perf_counter() - started)
        return result

    def attend(self, device: Any, arguments: Sequence[Any]) -> None:
        """Times ``Device.attend_step`` as a kernel."""
        started = time.perf_counter()
        self._attending = True
        device.attend_step(*arguments)
        self._attending = False
        self._model.synchronize()
        self._parts.add(ATTENTION, time.perf_counter() - started)


@dataclass(frozen=True)
class _TimedDevice:
    """Replaces the device in a step's attention metadata."""

    device: Any
    timer: _OperatorTimer

    def attend_step(self, *arguments: Any) -> None:
        self.timer.attend(self.device, arguments)
