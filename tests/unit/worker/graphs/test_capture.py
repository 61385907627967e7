"""Recorded steps: a replay computes what the code computes, and dynamic steps are refused."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch.nn import functional

from worker_svc.devices.attention import AttentionCall, AttentionParams
from worker_svc.devices.cuda.device import CudaDevice
from worker_svc.graphs.capture import NotStatic, Recorder
from worker_svc.graphs.replay import KernelGraph, build_kernel_graph

Step = Callable[[torch.Tensor], torch.Tensor]
PARAMS = AttentionParams(1, 1, 4, 1.0, 0, 0.0, writes=True)
WEIGHT = torch.linspace(-1, 1, 16).view(4, 4)


class AddingDevice(CudaDevice):
    """A device: its attention adds plan and sinks to the query and counts its calls in the cache."""

    torch_device: ClassVar[torch.device] = torch.device("cpu")

    def attend(self, call: AttentionCall, plan: Any) -> None:
        torch.add(call.query, plan, out=call.output)
        if call.sinks is not None:
            call.output.add_(call.sinks)
        call.cache.add_(1)


@dataclass(frozen=True)
class Metadata:
    plan: float


def record(step: Step, example: torch.Tensor) -> KernelGraph:
    return record_attending(lambda x, _: step(x), example)


def record_attending(
    step: Callable[[torch.Tensor, Recorder], torch.Tensor], example: torch.Tensor
) -> KernelGraph:
    """Records a step that takes its recorder for calls of attention."""
    static = example.clone()
    recorder = Recorder((static,))
    with torch.inference_mode(), recorder:
        output = step(static, recorder)
    return build_kernel_graph(recorder.finish(output), AddingDevice())


def views_and_kernels(x: torch.Tensor) -> torch.Tensor:
    left, right = functional.linear(x, WEIGHT).chunk(2, dim=-1)
    return torch.cat((functional.silu(left) * right, x[:, 1:3].transpose(0, 1).reshape(-1, 2)), dim=1)


def in_place(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(x)
    total += x
    total[:, 0].mul_(2)
    return total.add_(1).clone()


def types_and_reductions(x: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.float64)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    top, index = (wide * scale).topk(2, dim=-1)
    return (top.softmax(-1) + index).to(torch.bfloat16)


def through_an_allocation(x: torch.Tensor) -> torch.Tensor:
    output = torch.empty(x.shape)
    torch.mul(x, 3, out=output)
    return torch.where(output > 0, output, x.new_full((), -1.0))


def dropouts_and_questions_about_types(x: torch.Tensor) -> torch.Tensor:
    for dropout in (functional.dropout, functional.alpha_dropout, functional.feature_alpha_dropout):
        x = dropout(dropout(x * 2, 0.5, training=False), 0.5, training=False, inplace=True)
    return x.to(torch.promote_types(x.dtype, torch.result_type(x.double(), 1)))


STEPS = [
    dropouts_and_questions_about_types, views_and_kernels, in_place, types_and_reductions, through_an_allocation,
]  # fmt: skip


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_replay_computes_what_the_code_computes(step: Step) -> None:
    """A replay on new inputs equals the step's own result to the bit, also when replays alternate."""
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn((2, 4), generator=generator), torch.randn((2, 4), generator=generator)
    graph = record(step, torch.zeros(2, 4))
    for x in (first, second, first):
        assert torch.equal(graph.replay((x,), {}), step(x))


def test_constants_are_computed_once() -> None:
    """A replay omits results that depend only on weights, unless a later call writes them."""

    def step(x: torch.Tensor) -> torch.Tensor:
        scale = WEIGHT.float().exp() + 1.0
        counter = torch.ones(2, 4)
        counter += x
        return counter @ scale

    graph = record(step, torch.zeros(2, 4))
    assert graph.num_kernels == 3  # ones, +=, @
    x = torch.ones(2, 4)
    assert torch.equal(graph.replay((x,), {}), step(x))
    assert torch.equal(graph.replay((x,), {}), step(x))


def test_results_share_memory() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        for _ in range(100):
            x = x + 1
        return x

    graph = record(step, torch.zeros(2, 4))
    assert graph.num_kernels == 100
    assert graph.num_bytes == 2 * 2 * 4 * 4
    assert torch.equal(graph.replay((torch.ones(2, 4),), {}), torch.full((2, 4), 101.0))


def test_attention_gets_the_plan_of_each_replay() -> None:
    cache, query = torch.zeros(1), torch.ones(2, 4)

    def step(x: torch.Tensor, recorder: Recorder) -> torch.Tensor:
        for layer in ("a", "b"):
            output = torch.empty_like(x)
            recorder.attend(layer, AttentionCall(PARAMS, x * 2, x, x, cache, output))
            x = output + 1
        return x

    graph = record_attending(step, query)
    for first, second in ((10.0, 20.0), (30.0, 40.0)):
        plans = {"a": Metadata(first), "b": Metadata(second)}
        result = graph.replay((query,), plans)
        assert (result == (2 + first + 1) * 2 + second + 1).all()
    assert cache.item() == 4


def test_attention_gets_its_sinks_in_each_replay() -> None:
    sinks = torch.arange(4, dtype=torch.bfloat16)

    def step(x: torch.Tensor, recorder: Recorder) -> torch.Tensor:
        output = torch.empty_like(x)
        recorder.attend("a", AttentionCall(PARAMS, x * 2, x, x, torch.zeros(1), output, sinks.float()))
        return output * 3

    graph = record_attending(step, torch.zeros(2, 4))
    for x in (torch.ones(2, 4), torch.full((2, 4), 5.0)):
        assert torch.equal(graph.replay((x,), {"a": Metadata(10.0)}), (x * 2 + 10 + sinks) * 3)


def test_each_replay_changes_outside_state() -> None:
    """A step that writes to memory from before the recording writes there, not to a copy."""
    state = torch.zeros(2, 4)
    graph = record(lambda x: state.add_(x) * 1, torch.zeros(2, 4))
    for count in (1, 2):
        assert (graph.replay((torch.ones(2, 4),), {}) == count).all()
    assert (state == 2).all()


@pytest.mark.parametrize(
    ("step", "operator"),
    [
        (lambda x: x * x.sum().item(), "item"),
        (lambda x: x[x > 0], "index"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x + torch.rand_like(x), "rand_like"),
        (lambda x: functional.dropout(x, 0.5, training=True), "dropout"),
        (lambda x: (x * 1).unsqueeze_(0), "unsqueeze_"),
    ],
    ids=["value", "mask", "nonzero", "random", "training", "shape in place"],
)
def test_a_step_that_depends_on_data_is_refused(step: Step, operator: str) -> None:
    with pytest.raises(NotStatic, match=operator):
        record(step, torch.ones(2, 4))


def test_products_of_weights_alone_are_computed_while_recording() -> None:
    x = torch.ones(2, 4)
    recorder = Recorder((x,))
    with torch.inference_mode(), recorder:
        weights = torch.mm(WEIGHT, WEIGHT)
        product = functional.linear(x, weights)
    assert torch.equal(weights, WEIGHT @ WEIGHT)
    assert torch.count_nonzero(product) == 0
    graph = build_kernel_graph(recorder.finish(product), AddingDevice())
    assert graph.operators == ("aten::linear",)
    torch.testing.assert_close(graph.replay((x,), {}), x @ (WEIGHT @ WEIGHT).T)


def test_a_product_of_what_a_kernel_wrote_is_not_computed_while_recording() -> None:
    """A tensor that a kernel writes in place from the inputs differs from step to step, like its views."""
    x = torch.ones(2, 4)
    recorder = Recorder((x,))
    with torch.inference_mode(), recorder:
        copied = torch.ones(2, 4)
        copied.add_(x)
        product = torch.mm(copied[:, :2], WEIGHT[:2])
    assert torch.count_nonzero(product) == 0
    graph = build_kernel_graph(recorder.finish(product), AddingDevice())
    torch.testing.assert_close(graph.replay((x,), {}), (x + 1)[:, :2] @ WEIGHT[:2])
