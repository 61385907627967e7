"""Compiled graphs called with the tensors of their first call, with backend rbln-check."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from protos.errors import ConfigurationRefused
from protos.steps import GroupKind
from worker_svc.devices.attention import AttentionParams, InPlaceInput, PagedInput
from worker_svc.devices.rbln.bound_graph import CallRecorder
from worker_svc.devices.rbln.device import RblnDevice
from worker_svc.devices.registry import DeviceOptions
from worker_svc.shapes import AttentionLayer, KvGroup

GROUP = KvGroup(0, (AttentionLayer("a", 4, 2, 32, 16, torch.float32),), GroupKind.IN_PLACE_WINDOW)
FULL = KvGroup(0, (AttentionLayer("a", 4, 2, 32, 0, torch.float32),))
PARAMS = AttentionParams(
    num_heads=4, num_kv_heads=2, head_size=32, scale=1.0, window=0, softcap=0, writes=True
)


@pytest.fixture
def device() -> RblnDevice:
    opened = RblnDevice(DeviceOptions("rbln-check"))
    opened.check_available()
    return opened


def step(length: int, query_len: int = 1) -> InPlaceInput:
    fill = torch.tensor([[length]], dtype=torch.int32)
    return InPlaceInput(fill, fill + query_len, fill, query_len)


@torch.inference_mode()
def test_a_bound_graph_reads_new_tensors_without_the_function(device: RblnDevice) -> None:
    """Tensors of the call and of plans follow, weights stay, and the function's own code does not run."""
    weight, runs = torch.full((3,), 10.0), []
    plan = device.plan(GROUP, 16, step(4))
    compiled = device.compile(lambda x, _: x * weight + plan.cache_seq_len)

    def function(x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        runs.append(x)
        return compiled(x, unused)

    first, unused = torch.ones(1, 3), torch.ones(2)
    bound, result = device.bind(function, (first, unused))
    assert result.tolist() == [[14.0] * 3]
    device.plan(GROUP, 16, step(7))
    assert bound(torch.full((1, 3), 2.0), unused).tolist() == [[27.0] * 3]
    weight.fill_(20)
    assert bound(first, unused).tolist() == [[27.0] * 3]
    assert len(runs) == 1
    assert first.tolist() == [[1.0] * 3]


@torch.inference_mode()
def test_a_bound_graph_reads_parts_of_tensors(device: RblnDevice) -> None:
    """Of a tensor of the host, inputs are copies: graphs take whole tensors."""
    addresses = []

    def function(x: torch.Tensor) -> torch.Tensor:
        addresses.append(x.data_ptr())
        return compiled(x)

    compiled = device.compile(lambda x: x * 2)
    given = torch.arange(6.0)
    bound, result = device.bind(function, (given[3:],))
    assert result.tolist() == [6, 8, 10]
    assert bound(given[:3]).tolist() == [0, 2, 4]
    assert addresses[0] != given[3:].data_ptr()
    assert given.tolist() == [0, 1, 2, 3, 4, 5]


def test_plans_are_written_in_any_mode(device: RblnDevice) -> None:
    with torch.inference_mode():
        device.plan(GROUP, 16, step(4))
    assert device.plan(GROUP, 16, step(9)).cache_seq_len.tolist() == [[9]]  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["no graph", "an input", "two graphs"])
@torch.inference_mode()
def test_a_step_of_other_work_is_refused(device: RblnDevice, kind: str) -> None:
    compiled = device.compile(lambda x: x + 1)
    functions = {
        "no graph": lambda x: x + 1,
        "an input": lambda x: (compiled(x), x)[1],
        "two graphs": lambda x: compiled(compiled(x)),
    }
    with pytest.raises(ConfigurationRefused):
        device.bind(functions[kind], (torch.ones(3),))


@torch.inference_mode()
def test_calls_keep_no_tensors(device: RblnDevice) -> None:
    """Neither unbound calls do, nor graphs once the device has released them."""
    given = torch.ones(4)
    device.compile(lambda x: x * 4, by_shape=True)(torch.ones(4))
    device.compile(lambda x: x * 3)(given)
    plan = device.plan(GROUP, 16, step(4))
    held = [weakref.ref(given), weakref.ref(plan.block_tables)]
    del given, plan
    gc.collect()
    assert held[0]() is None
    device.release_unused()
    gc.collect()
    assert held[1]() is None


@torch.inference_mode()
def test_plans_of_other_steps_stay(device: RblnDevice) -> None:
    """A chunk and a decode step, groups of another kind, and layers that see more have plans of their own."""
    plans = [device.plan(GROUP, 16, each) for each in (step(4), step(5, query_len=8))]
    assert [each.cache_seq_len.tolist() for each in plans if each.cache_seq_len is not None] == [[[4]], [[5]]]
    one = torch.ones(1, dtype=torch.int32)
    paged = PagedInput(
        6 * one, torch.arange(2, dtype=torch.int32), one[None], torch.ones(1, dtype=torch.int64), 1
    )
    full = device.plan(FULL, 16, paged)
    assert full.seq_idx is not None
    assert full.seq_idx.tolist() == [[5]]
    assert plans[0].block_tables.tolist() == [[4]]
    masks = [
        device.plan_rows(torch.tensor([3]), 3, replace(PARAMS, causal=causal, window=window)).mask
        for causal, window in ((True, 2), (False, 2), (True, 0))
    ]
    assert [int((mask < 0).sum()) for mask in masks] == [4, 2, 3]


@torch.inference_mode()
def test_functions_of_tensors_have_a_graph_for_each_shape(device: RblnDevice) -> None:
    double = device.compile(lambda x: x * 2, by_shape=True)
    halve = device.compile(lambda x: x / 2, by_shape=True)
    for size in (2, 3, 2, 3):
        given = torch.full((size,), float(size))
        assert double(given).tolist() == [2.0 * size] * size
        assert halve(given).tolist() == [size / 2] * size
    assert len(device.backend.graphs) == 4
    assert double(torch.tensor([2**53 + 1, 1])).tolist() == [2**54 + 2, 2]
    device.release_unused()
    assert double(torch.ones(2)).tolist() == [2, 2]


def test_a_failed_step_fails_and_runs_nowhere_else() -> None:
    """A runtime's error reaches the caller, at each call, and the function is not run again."""
    runs, fails = [], False

    def backend(module: torch.fx.GraphModule, inputs: object) -> object:
        def run(*arguments: torch.Tensor) -> object:
            runs.append(arguments)
            if fails:
                raise RuntimeError("rebel: the device is gone")
            return module(*arguments)

        return run

    calls = CallRecorder()
    compiled = torch.compile(lambda x: x + 1, backend=calls.watch(backend), fullgraph=True)  # type: ignore[arg-type]
    bound, result = calls.bind(compiled, [torch.zeros(2)])
    assert result.tolist() == [1, 1]
    fails = True
    for run in (bound, compiled):
        with pytest.raises(RuntimeError, match="the device is gone"):
            run(torch.zeros(2))
    assert len(runs) == 3
