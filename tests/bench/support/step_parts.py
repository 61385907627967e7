"""A model whose steps tell where their time goes: each kernel of a forward, the output head, and when the logits were there."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from worker_svc.graphs.replay import ATTENTION
from worker_svc.vllm_adapter.engine import VllmModel

HEAD: Final = "output head"

# Our packed linear layers on a CPU, vLLM's (oneDNN's, and sgl-kernel's for small weights), and PyTorch's own.
_LINEAR: Final = frozenset({
    HEAD, "triptych_cpu::linear", "_C::onednn_mm", "_C::weight_packed_linear", "aten::linear", "aten::mm", "aten::addmm", "aten::bmm",
})  # fmt: skip


@dataclass
class StepParts:
    """What the kernels of one step took, seconds."""

    by_operator: dict[str, float] = field(default_factory=dict)
    logits_at: float = 0.0
    """When the logits were there, on the clock of ``time.perf_counter``; what follows is sampling."""

    def add(self, operator: str, seconds: float) -> None:
        """Counts one kernel."""
        self.by_operator[operator] = self.by_operator.get(operator, 0.0) + seconds

    @property
    def attention(self) -> float:
        """Writing keys and values, and attending."""
        return self.by_operator.get(ATTENTION, 0.0)

    @property
    def linear(self) -> float:
        """Matrix products of the layers and of the output head."""
        return sum(seconds for operator, seconds in self.by_operator.items() if operator in _LINEAR)

    @property
    def other(self) -> float:
        """Norms, activations, rotary positions, rows of the embedding."""
        return sum(self.by_operator.values()) - self.linear - self.attention


class TimedModel(VllmModel):
    """A model that notes what its kernels take, as long as it is given something to note it in.

    Attributes:
        parts: of the step that runs; ``None`` lets it run as it is.
    """

    parts: StepParts | None = None

    def synchronize(self) -> None:
        """Waits until the device has done what it was asked to."""
        self._device.synchronize()

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, plans: Mapping[str, Any]
    ) -> torch.Tensor:
        """See the base class."""
        if self.parts is None:
            return super().forward(token_ids, positions, plans)
        with _OperatorTimer(self, self.parts) as timer:
            timed = {
                name: dataclasses.replace(plan, device=_TimedDevice(plan.device, timer))
                for name, plan in plans.items()
            }
            return super().forward(token_ids, positions, timed)

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
    """Times the operators of a model's own forward. What attention is made of counts as attention."""

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
        """``Device.attend`` as one kernel."""
        started = time.perf_counter()
        self._attending = True
        device.attend(*arguments)
        self._attending = False
        self._model.synchronize()
        self._parts.add(ATTENTION, time.perf_counter() - started)


@dataclass(frozen=True)
class _TimedDevice:
    """Stands in a step's attention metadata where its device was."""

    device: Any
    timer: _OperatorTimer

    def attend(self, *arguments: Any) -> None:
        self.timer.attend(self.device, arguments)
