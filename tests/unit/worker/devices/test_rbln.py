"""Device rbln with backend rbln-check: caches, plans, graphs and refusals."""

import contextlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from protos.errors import ConfigurationRefused
from protos.steps import BlockCopy, GroupKind
from worker_svc.devices import open_device, plain_attention
from worker_svc.devices.attention import AttentionCall, AttentionParams, InPlaceInput, PagedInput, RowsPlan
from worker_svc.devices.rbln import operators
from worker_svc.devices.rbln.check_backend import CheckBackend, MetaMemory
from worker_svc.devices.rbln.device import RblnDevice
from worker_svc.devices.registry import DeviceOptions
from worker_svc.execution.engine import Engine
from worker_svc.execution.kv_cache import KvCache
from worker_svc.shapes import AttentionLayer, KvGroup, ModelDescription, ShapeConfig, group_layers

HEADS, KV_HEADS, SIZE, WINDOW, BLOCK = 6, 2, 32, 16, 64


def open_check(*, triton: bool = False) -> RblnDevice:
    device = RblnDevice(DeviceOptions("rbln-check", rbln_use_custom_kernel=triton))
    device.check_available()
    return device


def group_of(kind: GroupKind, names: str = "a") -> KvGroup:
    window = 0 if kind is GroupKind.FULL else WINDOW
    layers = [AttentionLayer(name, HEADS, KV_HEADS, SIZE, window, torch.float32) for name in names]
    return KvGroup(0, tuple(layers), kind)


def params_of(group: KvGroup, **changed: Any) -> AttentionParams:
    fields = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": SIZE, "scale": 0.2}
    return AttentionParams(**{**fields, "window": group.window, "softcap": 0.0, "writes": True, **changed})


@pytest.mark.skipif(importlib.util.find_spec("rebel") is not None, reason="the vendor's packages are here")
def test_the_plugin_s_name_of_the_profiler_reaches_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_RBLN_PROFILER", "1")
    monkeypatch.setenv("RBLN_PROFILER", "own")
    for expected in ("own", "1"):
        with pytest.raises(ConfigurationRefused):
            open_device("rbln")
        assert os.environ["RBLN_PROFILER"] == expected
        monkeypatch.delenv("RBLN_PROFILER")


@pytest.mark.parametrize(("triton", "where"), [(False, "meta"), (True, "cpu")])
def test_where_caches_are(triton: bool, where: str) -> None:
    """The compiler's kernels use handles, Triton's use host memory; each layer has a whole tensor."""
    device = open_check(triton=triton)
    cache = KvCache(device, [group_of(GroupKind.FULL, "ab")], BLOCK, [5])
    for tensor in cache.by_layer().values():
        assert tensor.device.type == where
        assert tensor.storage_offset() == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.shape[device.block_dim] == 5


@pytest.mark.parametrize("triton", [False, True])
def test_blocks_are_cleared_and_copied_where_they_are(triton: bool) -> None:
    """Clearing and copying blocks covers all layers of one group, in either layout, also behind handles."""
    device = open_check(triton=triton)
    groups = group_layers(
        [AttentionLayer(name, 4, 2, SIZE, window, torch.float32) for name, window in (("a", 0), ("b", 0), ("w", 16))],
        GroupKind.IN_PLACE_WINDOW,
    )  # fmt: skip
    cache = KvCache(device, groups, BLOCK, (4, 3))
    real = {name: device.memory.resolve(tensor) for name, tensor in cache.by_layer().items()}
    for number, tensor in enumerate(real.values(), start=1):
        tensor.copy_(torch.arange(tensor.numel(), dtype=torch.float32).view(tensor.shape) + number)
    before = {name: tensor.clone() for name, tensor in real.items()}
    cache.copy([BlockCopy(0, 1, 3, 7)])
    cache.clear(0, [2])

    def block(tensors: dict[str, torch.Tensor], name: str, number: int) -> torch.Tensor:
        return tensors[name].select(device.block_dim, number)

    for name in "ab":
        assert torch.equal(block(real, name, 3)[..., :7, :], block(before, name, 1)[..., :7, :])
        assert not block(real, name, 3)[..., 7:, :].any()
        assert not block(real, name, 2).any()
        assert all(torch.equal(block(real, name, n), block(before, name, n)) for n in (0, 1))
    assert torch.equal(real["w"], before["w"])


def test_memory_is_freed_with_its_handles() -> None:
    memory = MetaMemory()
    handle = memory.allocate((2, 3), torch.float32)
    view = handle[1]
    memory.resolve(view).fill_(4)
    assert memory.resolve(handle).tolist() == [[0] * 3, [4] * 3]
    assert len(memory) == 1
    del handle, view
    assert len(memory) == 0


def test_padded_rows_have_no_tokens() -> None:
    """A padded row has length and offset 0 and the null block, and a chunk's table has one dimension."""
    device = open_check()
    group = group_of(GroupKind.IN_PLACE_WINDOW)
    column = torch.tensor([[3], [0]], dtype=torch.int32)
    plan = device.plan(group, BLOCK, InPlaceInput(column, column + 1, column, 1))
    assert plan.operator == "sliding_window_attention_naive_decode"
    assert plan.block_tables.tolist() == [[3], [0]]
    assert plan.cache_seq_len is not None
    assert plan.cache_offset is not None
    assert plan.cache_seq_len.tolist() == [[3], [0]]
    assert plan.cache_offset.tolist() == [[4], [0]]
    plan = device.plan(group, BLOCK, InPlaceInput(column[:1], column[:1] + 5, column[:1], 8))
    assert plan.operator == "sliding_window_attention_naive_prefill"
    assert plan.block_tables.tolist() == [3]


def paged_steps(partitions: int) -> list[PagedInput]:
    """A full chunk, a padded chunk after it, and a decode step with a padded row."""
    tables = torch.zeros((2, partitions), dtype=torch.int32)
    tables[0] = torch.arange(1, partitions + 1)

    def chunk(start: int, count: int) -> PagedInput:
        slots = torch.zeros(32, dtype=torch.int64)
        positions = torch.arange(start, start + count)
        slots[:count] = tables[0, positions // BLOCK].long() * BLOCK + positions % BLOCK
        ends = torch.tensor([0, count], dtype=torch.int32)
        return PagedInput(torch.tensor([start + count]).int(), ends, tables[:1], slots, count)

    at = torch.tensor([49, 0])
    slots = tables.gather(1, (at // BLOCK)[:, None])[:, 0].long() * BLOCK + at % BLOCK
    decode = PagedInput((at + 1).int(), torch.arange(3).int(), tables, slots, 2)
    return [chunk(0, 32), chunk(32, 17), decode]


def compiled_attend(
    device: RblnDevice, params: AttentionParams, sinks: torch.Tensor | None = None
) -> Callable[..., torch.Tensor]:
    """Compiles attention as one graph."""

    def attend(query: Any, key: Any, value: Any, cache: Any, plan: Any) -> torch.Tensor:
        output = torch.empty_like(query)
        device.attend(AttentionCall(params, query, key, value, cache, output, sinks), plan)
        return output

    return device.compile(attend)


def sinks_of(params: AttentionParams) -> torch.Tensor | None:
    return torch.linspace(-1, 2, HEADS) if params.sinks else None


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize(
    ("kind", "triton", "with_sinks"),
    [
        (GroupKind.FULL, False, False),
        (GroupKind.FULL, True, False),
        (GroupKind.PAGED_WINDOW, False, False),
        (GroupKind.FULL, False, True),
        (GroupKind.PAGED_WINDOW, False, True),
    ],
)
def test_graphs_over_paged_blocks_match_the_reference(
    kind: GroupKind, triton: bool, with_sinks: bool, partitions: int
) -> None:
    device, group = open_check(triton=triton), group_of(kind)
    params = params_of(group, sinks=with_sinks)
    device.check_attention(params)
    sinks = sinks_of(params)
    attend = compiled_attend(device, params, sinks)
    (cache,) = KvCache(device, [group], BLOCK, [5]).by_layer().values()
    device.memory.resolve(cache).fill_(torch.nan)
    plain = torch.zeros((5, 2, BLOCK, KV_HEADS, SIZE))
    generator = torch.Generator().manual_seed(0)
    for step in paged_steps(partitions):
        tokens = step.slot_mapping.shape[0]
        query = torch.randn((tokens, HEADS, SIZE), generator=generator)
        key, value = torch.randn((2, tokens, KV_HEADS, SIZE), generator=generator)
        expected = torch.empty_like(query)
        plan = plain_attention.GatheredPlan.of(step)
        plain_attention.attend(AttentionCall(params, query, key, value, plain, expected, sinks), plan)
        real = step.num_tokens if tokens > 2 else 1  # the second row of the decode step is padding
        ours = attend(query, key, value, cache, device.plan(group, BLOCK, step))
        torch.testing.assert_close(ours[:real], expected[:real], atol=1e-5, rtol=1e-5)
    assert len(device.backend.graphs) == 2


@pytest.mark.filterwarnings("ignore::FutureWarning")  # copies of programs in torch
@pytest.mark.parametrize("triton", [False, True])
def test_exported_programs_write_the_cache(triton: bool) -> None:
    """The vendor's Triton operators hide the write, and so stay whole when a program becomes functional."""
    device, group = open_check(triton=triton), group_of(GroupKind.FULL)
    params = params_of(group)
    device.check_attention(params)
    plan = device.plan(group, BLOCK, paged_steps(3)[0])

    class Layer(torch.nn.Module):
        def forward(
            self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor
        ) -> torch.Tensor:
            output = torch.empty_like(query)
            device.attend(AttentionCall(params, query, key, value, cache, output), plan)
            return output

    query, (key, value) = torch.randn((32, HEADS, SIZE)), torch.randn((2, 32, KV_HEADS, SIZE))
    cache = torch.zeros(device.cache_shape(group, 5, BLOCK))
    traced = torch.export.export(Layer(), (query, key, value, cache))
    functional = traced.run_decompositions({})
    for program in (traced, functional):
        cache.zero_()
        program.module()(query, key, value, cache)
        assert cache.any()
    names = [str(node.target) for node in functional.graph.nodes if node.op == "call_function"]
    assert any(name.startswith("rbln_triton_ops.flash_causal_attention_naive") for name in names) == triton
    assert bool(functional.graph_signature.user_inputs_to_mutate) != triton


@pytest.mark.parametrize(("triton", "with_sinks"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("counts", [(12, 7), (5, 5, 5, 4), (16, 16, 2), (32, 9), (1, 1)])
def test_graphs_over_windows_in_place_match_the_reference(
    counts: tuple[int, ...], triton: bool, with_sinks: bool
) -> None:
    device, group = open_check(triton=triton), group_of(GroupKind.IN_PLACE_WINDOW)
    params = params_of(group, sinks=with_sinks)
    device.check_attention(params)
    sinks = sinks_of(params)
    attend = compiled_attend(device, params, sinks)
    (cache,) = KvCache(device, [group], BLOCK, [3]).by_layer().values()
    device.memory.resolve(cache).fill_(torch.nan)
    plain = torch.zeros(plain_attention.cache_shape(group, 3, 0) or ())
    generator = torch.Generator().manual_seed(0)
    blocks = torch.tensor([[2], [0]], dtype=torch.int32)
    length = 0
    for count, query_len in (*((count, counts[0]) for count in counts), *[(1, 1)] * 4):
        before = min(length, WINDOW)
        rows = 1 if query_len > 1 else 2
        start = torch.tensor([[before], [0]], dtype=torch.int32)[:rows]
        end = torch.tensor([[before + count], [1]], dtype=torch.int32)[:rows]
        step = InPlaceInput(start, end, blocks[:rows], query_len)
        length += count
        query = torch.randn((rows * query_len, HEADS, SIZE), generator=generator)
        key, value = torch.randn((2, rows * query_len, KV_HEADS, SIZE), generator=generator)
        expected = torch.empty_like(query)
        plan = plain_attention.InPlacePlan.of(group, step)
        plain_attention.attend(AttentionCall(params, query, key, value, plain, expected, sinks), plan)
        ours = attend(query, key, value, cache, device.plan(group, BLOCK, step))
        torch.testing.assert_close(ours[:count], expected[:count], atol=1e-5, rtol=1e-5)
    assert len(device.backend.graphs) == (2 if counts[0] > 1 else 1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"softcap": 30.0}, "soft caps"),
        ({"writes": False}, "another layer's KV cache"),
        ({"head_size": 48}, "heads of 48"),
    ],
)
def test_layers_without_a_kernel_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationRefused, match=message):
        open_check().check_attention(params_of(group_of(GroupKind.FULL), **changed))


def test_tritons_kernels_take_neither_sinks_nor_paged_windows() -> None:
    params = params_of(group_of(GroupKind.FULL), sinks=True)
    with pytest.raises(ConfigurationRefused, match="sinks with RBLN_USE_CUSTOM_KERNEL=1"):
        open_check(triton=True).check_attention(params)
    with pytest.raises(ConfigurationRefused, match="RBLN_USE_CUSTOM_KERNEL=0"):
        open_check(triton=True).cache_shape(group_of(GroupKind.PAGED_WINDOW), 3, BLOCK)


@pytest.mark.parametrize(
    ("chip", "served", "refused", "flag"),
    [
        ("RBLN-CR13", GroupKind.PAGED_WINDOW, GroupKind.IN_PLACE_WINDOW, "paged"),
        ("rbln-cr13", GroupKind.PAGED_WINDOW, GroupKind.IN_PLACE_WINDOW, "paged"),
        ("RBLN-CR03", GroupKind.IN_PLACE_WINDOW, GroupKind.PAGED_WINDOW, "in-place"),
        ("RBLN-CA25", GroupKind.IN_PLACE_WINDOW, GroupKind.PAGED_WINDOW, "in-place"),
    ],
)
def test_the_chip_decides_windows_and_the_order_of_rows(
    monkeypatch: pytest.MonkeyPatch, chip: str, served: GroupKind, refused: GroupKind, flag: str
) -> None:
    monkeypatch.setenv("RBLN_TARGET_SOC", chip)
    device = open_check()
    assert device.window_kind is served
    assert device.sorts_rows == (served is GroupKind.PAGED_WINDOW)
    assert len(device.cache_shape(group_of(served), 3, BLOCK)) == 6
    assert len(device.cache_shape(group_of(GroupKind.FULL), 3, BLOCK)) == 6
    with pytest.raises(ConfigurationRefused, match=f"{chip} .*--window-kv {flag}"):
        device.cache_shape(group_of(refused), 3, BLOCK)


@pytest.mark.parametrize(("chip", "is_sorted"), [("RBLN-CR13", True), ("RBLN-CA25", False)])
def test_kernels_hear_whether_rows_are_sorted(
    monkeypatch: pytest.MonkeyPatch, chip: str, is_sorted: bool
) -> None:
    """Operators with the argument get it; see `call_form`."""
    monkeypatch.setenv("RBLN_TARGET_SOC", chip)
    calls: list[Mapping[str, Any]] = []

    def emit(_: Any, by_role: Mapping[str, Any]) -> torch.Tensor:
        calls.append(by_role)
        return torch.zeros_like(by_role["q"])

    monkeypatch.setattr(operators, "emit", emit)
    device, group = open_check(), group_of(GroupKind.FULL)
    params = params_of(group)
    device.check_attention(params)
    cache = device.allocate(device.cache_shape(group, 4, BLOCK), torch.float32)
    states = torch.zeros(2, KV_HEADS, SIZE)
    query = torch.zeros(2, HEADS, SIZE)
    plan = device.plan(group, BLOCK, paged_steps(2)[-1])
    device.attend(AttentionCall(params, query, states, states, cache, torch.empty_like(query)), plan)
    (call,) = calls
    assert call["is_prompt_sorted"] is is_sorted


@pytest.mark.parametrize(
    ("chunk", "block_size", "fits"),
    [(128, 1024, True), (1024, 1024, True), (16384, 16384, True), (2048, 1024, False), (128, 32768, False)],
)
def test_a_chunk_fits_into_a_block_and_a_block_into_the_kernels(
    chunk: int, block_size: int, fits: bool
) -> None:
    layer = AttentionLayer("a", HEADS, KV_HEADS, SIZE, 0, torch.float32)
    model = ModelDescription(
        "Tiny", 100, 65_536, (), torch.float32, quantization=None, layers=(layer,), pooling=None,
        default_sampling={},
    )  # fmt: skip
    unused: Any = None
    engine = Engine(
        unused, open_check(), model, group_layers([layer]), budget=unused, compilation=unused, options=unused
    )
    shapes = ShapeConfig(4096, 1, chunk, block_size, (1,))
    with (
        contextlib.nullcontext()
        if fits
        else pytest.raises(ConfigurationRefused, match=r"--max-num-batched-tokens.*--block-size.* 16384")
    ):
        assert engine.check(shapes) == shapes


@pytest.mark.parametrize(("causal", "window"), [(False, 0), (True, 0), (True, 2)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_graphs_over_rows_match_the_reference(causal: bool, window: int, kv_heads: int) -> None:
    """Attention without a cache is plain operators for heads of any size, and padding has no effect."""
    device, lengths, heads, size = open_check(), torch.tensor([5, 1, 3]), 4, 12
    params = AttentionParams(heads, kv_heads, size, 0.3, window, 0.0, writes=True, causal=causal)

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        output = torch.empty_like(query)
        device.attend_step(AttentionCall(params, query, key, value, torch.empty(0), output), RowsPlan(mask))
        return output

    compiled = device.compile(attend)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn((15, n, size), generator=generator) for n in (heads, kv_heads, kv_heads))
    expected = torch.empty_like(query)
    cpu = open_device("cpu")
    cpu.attend_step(
        AttentionCall(params, query, key, value, torch.empty(0), expected), cpu.plan_rows(lengths, 5, params)
    )
    mask = device.plan_rows(lengths, 5, params).mask
    real = (torch.arange(5) < lengths[:, None]).flatten()
    ours = compiled(query, key, value, mask)
    torch.testing.assert_close(ours[real], expected[real], atol=1e-5, rtol=1e-5)
    for states in (query, key, value):
        states[~real] = 1000.0
    padded = compiled(query, key, value, mask)
    assert torch.equal(padded[real], ours[real])
    assert padded.isfinite().all()
    assert len(device.backend.graphs) == 1


def test_an_npu_attends_in_graphs_alone() -> None:
    """Attention outside of a graph is refused before an operator reaches the NPU."""
    device = RblnDevice(DeviceOptions(rbln_use_device_tensor=False))
    params = params_of(group_of(GroupKind.FULL))
    states = torch.zeros(2, HEADS, SIZE)
    call = AttentionCall(params, states, states, states, torch.empty(0), states)
    with pytest.raises(ConfigurationRefused, match="--backend eager needs --rbln-backend rbln-check"):
        device.attend_step(call, device.plan_rows(torch.tensor([2]), 2, params))


def refused(function: Callable[..., Any], *arguments: Any, dynamic: bool | None = False) -> str:
    """Returns the backend's refusal."""
    backend: Any = CheckBackend(MetaMemory())
    compiled = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        compiled(*arguments)
    assert isinstance(caught.value.inner_exception, ConfigurationRefused)
    return caught.value.inner_exception.message


@pytest.mark.parametrize(
    ("function", "dynamic", "words"),
    [
        (lambda x: x + 1, True, ["dynamic"]),
        (lambda x: torch.linalg.det(x) + 1, False, ["operator aten::", "det", "test_rbln.py"]),
        (lambda x: torch.nonzero(x) + 1, False, ["aten::nonzero"]),
    ],
    ids=["dynamic", "operator", "size"],
)
def test_what_no_static_graph_has_is_refused(
    function: Callable[..., Any], dynamic: bool, words: list[str]
) -> None:
    """The refusal names the operator and the line of the model, even where torch would capture it."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        message = refused(function, torch.eye(3), dynamic=dynamic)
    assert all(word in message for word in words)


def test_a_graph_break_is_refused() -> None:
    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(ConfigurationRefused, match="cannot be captured as one graph"):
        open_check().compile(breaks)(torch.zeros(3))


def test_an_accepted_graph_computes_the_functions_result() -> None:
    device = open_check()

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out.copy_(x @ y)
        return torch.nn.functional.silu(out) + x

    x, y = torch.randn(2, 3, 3)
    torch.testing.assert_close(device.compile(function)(x, y), function(x, y))
    (graph,) = device.backend.graphs
    assert "copy_" in {
        node.target._schema.name.partition("::")[2]
        for node in graph.graph.nodes
        if node.op == "call_function"
    }
