"""The vendor's own Python compared with ours: calls of operators, schemas of operators, buckets.

`tests/contract/worker/test_rbln_oracle.py` runs this file in a process of its own, because the vendor's
modules declare operators for good. Real: vllm-rbln's builder of attention metadata, its attention layer,
shapes of caches, declarations of Triton operators and buckets, and vLLM's classes that these use. Mocked:
`rebel.triton`, whose kernels never run (`fakes/rebel`); vLLM's configuration, a namespace of the fields that
are read; the layer that holds the scales of an 8-bit cache.
"""

import contextlib
import importlib
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protos.errors import ConfigurationRefused
from protos.steps import Admission, GroupKind, Prefill
from scheduler_svc.shapes.buckets import BucketStrategy, bucket_for, decode_buckets
from tests.support.operator_calls import OperatorCalls
from tests.support.property_settings import scaled
from tests.support.rbln.vendor_packages import FAKES, installed
from tests.support.sampling_params import sampling_params
from worker_svc.devices.attention import AttentionCall, AttentionParams
from worker_svc.devices.rbln import operators
from worker_svc.devices.rbln.device import RblnDevice
from worker_svc.devices.rbln.operators import NAMESPACES, TRITON
from worker_svc.devices.registry import DeviceOptions
from worker_svc.execution.batch import Batch
from worker_svc.sampling.state import SamplingVocabulary
from worker_svc.shapes import AttentionLayer, KvGroup, ShapeConfig

sys.path[:0] = [str(FAKES), str(installed() / "site")]
vendor: Any = importlib.import_module("vllm_rbln.v1.attention.backends.flash_attention")
vllm_config: Any = importlib.import_module("vllm.config")
specs: Any = importlib.import_module("vllm.v1.kv_cache_interface")
window_specs: Any = importlib.import_module("vllm_rbln.v1.kv_cache")
rbln_config: Any = importlib.import_module("vllm_rbln.config")
buckets: Any = importlib.import_module("vllm_rbln.v1.worker.bucketing")
operators.register_all()

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A layer and a step: a chunk if `count` is not 0, else a decode step."""

    triton: bool
    kind: GroupKind
    kv_heads: int
    heads_per_kv: int
    head_size: int
    dtype: torch.dtype
    scale: float
    sinks: bool
    block_size: int
    partitions: int
    max_model_len: int
    window: int
    chunk: int
    count: int
    computed: tuple[int, ...]
    """Tokens of each row before the step."""
    bucket: int
    seed: int

    @property
    def group(self) -> KvGroup:
        """The layer as the worker sees it."""
        layer = AttentionLayer(
            "layer", self.kv_heads * self.heads_per_kv, self.kv_heads, self.head_size, self.window, self.dtype
        )
        return KvGroup(0, (layer,), self.kind)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draws layers and steps that both sides serve.

    A single block is as long as the longest sequence. In a longer block, the vendor runs the kernel for many
    blocks, and we that for one.
    """
    triton = draw(st.booleans())
    kinds = [GroupKind.FULL, GroupKind.FULL, GroupKind.IN_PLACE_WINDOW]
    kind = draw(st.sampled_from(kinds if triton else [*kinds, GroupKind.PAGED_WINDOW]))
    block_size, partitions = draw(st.sampled_from([16, 32])), draw(st.integers(1, 4))
    chunk = draw(st.sampled_from([4, 8, 16]))
    room = block_size * partitions
    max_model_len = draw(st.integers(room - block_size + 1, room)) if partitions > 1 else room
    longest = max_model_len - 1
    is_chunk = draw(st.booleans())
    if is_chunk:
        start = chunk * draw(st.integers(0, longest // chunk))
        rows, count = [start], draw(st.integers(1, min(chunk, longest + 1 - start)))
    else:
        rows, count = draw(st.lists(st.integers(0, longest), min_size=1, max_size=5)), 0
    return Case(
        triton=triton,
        kind=kind,
        kv_heads=draw(st.integers(1, 3)),
        heads_per_kv=draw(st.integers(1, 3)),
        head_size=draw(st.sampled_from([32, 64])),
        dtype=draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
        scale=draw(st.sampled_from([0.125, 0.17677669529, 0.5])),
        sinks=not triton and draw(st.booleans()),
        block_size=block_size,
        partitions=partitions,
        max_model_len=max_model_len,
        window=0 if kind is GroupKind.FULL else draw(st.sampled_from([8, 16])),
        chunk=chunk,
        count=count,
        computed=tuple(rows),
        bucket=1 if is_chunk else len(rows) + draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 999)),
    )


class Inputs:
    """The same tensors for both sides."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(case.seed)
        self.rows = len(case.computed)
        in_place = case.kind is GroupKind.IN_PLACE_WINDOW
        width = 1 if in_place else case.partitions
        self.num_blocks = 1 + self.rows * width
        numbers = torch.randperm(self.num_blocks - 1, generator=generator).int() + 1
        self.tables = torch.zeros((self.rows, width), dtype=torch.int32)
        for row, (computed, blocks) in enumerate(
            zip(case.computed, numbers.view(self.rows, width), strict=True)
        ):
            used = 1 if in_place else -(-(computed + max(case.count, 1)) // case.block_size)
            self.tables[row, :used] = blocks[:used]
        heads = case.kv_heads * case.heads_per_kv
        tokens = case.chunk if case.count else case.bucket
        self.query = torch.randn((tokens, heads, case.head_size), generator=generator).to(case.dtype)
        self.key, self.value = torch.randn(
            (2, tokens, case.kv_heads, case.head_size), generator=generator
        ).to(case.dtype)
        self.sinks = torch.randn(heads, generator=generator) if case.sinks else None
        self.fill = generator


def configuration(case: Case) -> Any:
    """Returns the fields of vLLM's configuration that the vendor's classes read."""
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=case.max_model_len, enforce_eager=False),
        cache_config=SimpleNamespace(block_size=case.block_size),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=case.chunk),
        attention_config=SimpleNamespace(use_non_causal=False),
        device_config=SimpleNamespace(device=CPU),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        additional_config=rbln_config.RBLNConfig(use_custom_kernel=case.triton),
    )


def spec_of(case: Case) -> Any:
    """Returns the group as the vendor describes it."""
    shape = {
        "block_size": case.block_size,
        "num_kv_heads": case.kv_heads,
        "head_size": case.head_size,
        "dtype": case.dtype,
    }
    if case.kind is GroupKind.FULL:
        return specs.FullAttentionSpec(**shape)
    in_place = case.kind is GroupKind.IN_PLACE_WINDOW
    kind = window_specs.RBLNSlidingWindowSpec if in_place else specs.SlidingWindowSpec
    return kind(**shape, sliding_window=case.window)


def theirs(case: Case, inputs: Inputs, cache: torch.Tensor) -> torch.Tensor:
    """Runs the vendor's builder and layer."""
    config = configuration(case)
    if case.count:
        starts = torch.tensor([0, case.count])
        positions = torch.arange(case.computed[0], case.computed[0] + case.count)
    else:
        starts, positions = torch.arange(inputs.rows + 1), torch.tensor(case.computed)
    seq_lens = torch.tensor(case.computed) + starts.diff()
    common = vendor.CommonAttentionMetadata(
        query_start_loc=starts.int(),
        query_start_loc_cpu=starts.int(),
        seq_lens=seq_lens.int(),
        num_reqs=inputs.rows,
        num_actual_tokens=len(positions),
        max_query_len=case.count or 1,
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=inputs.tables,
        slot_mapping=torch.tensor(0),
    )
    heads = case.kv_heads * case.heads_per_kv
    with vllm_config.set_current_vllm_config(config):
        builder = vendor.RBLNFlashAttentionMetadataBuilder(spec_of(case), ["layer"], config, CPU)
        layer = vendor.RBLNFlashAttentionImpl(
            heads,
            case.head_size,
            case.scale,
            case.kv_heads,
            None,
            case.window or None,
            "auto",
            sinks=inputs.sinks,
        )
    # The vendor's metadata asks tensors of windows for their truth value before it casts them.
    casts_windows = case.triton and case.kind is GroupKind.IN_PLACE_WINDOW
    builder.use_custom_kernel = case.triton and not casts_windows
    metadata = builder.build(common, positions, case.bucket, is_prefill=bool(case.count))
    if casts_windows:
        for name in ("seq_lens", "cache_seq_lens", "cache_offsets"):
            setattr(metadata, name, getattr(metadata, name).int())
    one = torch.tensor(1.0)
    output = torch.empty_like(inputs.query)
    scales = SimpleNamespace(_k_scale=one, _v_scale=one)
    layer.forward(scales, inputs.query, inputs.key, inputs.value, cache, metadata, output)
    return output


def ours(case: Case, inputs: Inputs, device: RblnDevice, cache: torch.Tensor) -> torch.Tensor:
    """Runs the worker's batch and the device."""
    shapes = ShapeConfig(case.max_model_len, inputs.rows, case.chunk, case.block_size, (case.bucket,))
    batch = Batch(shapes, [case.group], [inputs.num_blocks], CPU, SamplingVocabulary(300))
    for slot, (computed, blocks) in enumerate(zip(case.computed, inputs.tables.tolist(), strict=True)):
        tokens = [1] * (computed + max(case.count, 1))
        held = [block for block in blocks if block]
        batch.admit(Admission(slot, tokens, computed, sampling_params(temperature=0.0), {0: held}))
    batch.copy_admitted()
    if case.count:
        work = Prefill(0, case.computed[0], case.count, sample=True)
        _, _, (step,) = batch.prefill_inputs(case.chunk, work)
    else:
        padding = [batch.padding_row] * (case.bucket - inputs.rows)
        _, _, (step,) = batch.decode_inputs(torch.tensor([*range(inputs.rows), *padding]))
    params = AttentionParams(
        case.kv_heads * case.heads_per_kv, case.kv_heads, case.head_size, case.scale, case.window, 0.0,
        writes=True, sinks=case.sinks,
    )  # fmt: skip
    device.check_attention(params)
    output = torch.empty_like(inputs.query)
    call = AttentionCall(params, inputs.query, inputs.key, inputs.value, cache, output, inputs.sinks)
    device.attend(call, device.plan(case.group, case.block_size, step))
    return output


@scaled(1000)
@given(case=cases())
def test_calls_are_the_vendor_s(case: Case) -> None:
    """Operators, order, shapes, types and values of arguments; then results and caches."""
    inputs = Inputs(case)
    device = RblnDevice(DeviceOptions("rbln-check", rbln_use_custom_kernel=case.triton))
    kernel_block = case.window if case.kind is GroupKind.IN_PLACE_WINDOW else case.block_size
    shape = device.cache_shape(case.group, inputs.num_blocks, case.block_size)
    with vllm_config.set_current_vllm_config(configuration(case)):
        assert shape == vendor.RBLNFlashAttentionBackend.get_kv_cache_shape(
            inputs.num_blocks, kernel_block, case.kv_heads, case.head_size
        )
    cache = torch.randn(shape, generator=inputs.fill).to(case.dtype)
    caches = cache.clone(), cache
    with OperatorCalls(*NAMESPACES) as expected:
        their_output = theirs(case, inputs, caches[0])
    with OperatorCalls(*NAMESPACES) as emitted:
        our_output = ours(case, inputs, device, caches[1])
    ((operator, given_ours),) = emitted.calls
    ((their_operator, given_theirs),) = expected.calls
    assert operator == their_operator
    namespace, _, name = operator.partition("::")
    roles = [argument.role for argument in operators.SIGNATURES[namespace][name]]
    assert len(given_ours) == len(given_theirs)
    for role, own, other in zip(roles, given_ours, given_theirs, strict=False):
        assert type(own) is type(other), role
        if isinstance(own, torch.Tensor):
            assert (own.dtype, own.shape) == (other.dtype, other.shape), role
            assert torch.equal(own, other), role
        else:
            assert own == other, role
    assert torch.equal(our_output, their_output)
    assert torch.equal(*caches)


def test_triton_operators_are_declared_as_ours() -> None:
    """By name and order of arguments. Theirs declare no write to the cache, and ours must not matter."""
    masked = ("flash_attention_naive", "attention_naive")
    declared = [name for name in torch.ops.rbln_triton_ops if not name.startswith(masked)]
    assert set(declared) == {*operators.SIGNATURES[TRITON]}
    for name, arguments in operators.SIGNATURES[TRITON].items():
        schema = getattr(torch.ops.rbln_triton_ops, name).default._schema
        assert [each.name for each in schema.arguments] == [argument.name for argument in arguments]
        assert {str(each.type) for each in schema.arguments} == {"Tensor"}
        assert not any(each.alias_info for each in schema.arguments)


def test_head_sizes_are_the_vendor_s() -> None:
    device = RblnDevice(DeviceOptions("rbln-check"))
    served = []
    for size in range(1, 513):
        params = AttentionParams(1, 1, size, 1.0, 0, 0.0, writes=True)
        with contextlib.suppress(ConfigurationRefused):
            device.check_attention(params)
            served.append(size)
    assert served == vendor.RBLNFlashAttentionBackend.get_supported_head_sizes()


STRATEGIES: tuple[BucketStrategy, ...] = ("exponential", "linear", "manual")


@scaled(1000)
@given(
    strategy=st.sampled_from(STRATEGIES),
    largest=st.integers(-1, 300),
    smallest=st.integers(-1, 300),
    step=st.integers(-1, 40),
    limit=st.integers(-1, 40),
    manual=st.lists(st.integers(1, 300), max_size=8),
    ends=st.booleans(),
)
def test_decode_buckets_are_the_vendor_s(
    strategy: BucketStrategy,
    largest: int,
    smallest: int,
    step: int,
    limit: int,
    manual: list[int],
    ends: bool,
) -> None:
    """Refusals, too, and the bucket of each batch."""
    if ends:
        smallest = min(smallest, largest)
        manual = [*(size for size in manual if size < largest), *[largest] * (largest > 0)]
    try:
        manager = buckets.get_bucketing_manager(
            strategy,
            max_batch_size=largest,
            min_batch_size=smallest,
            step=step,
            limit=limit,
            manual_buckets=manual,
        )
    except (ValueError, AssertionError):
        with pytest.raises(ValueError):
            decode_buckets(
                strategy, max_batch=largest, minimum=smallest, step=step, limit=limit, manual=manual
            )
        return
    sizes = decode_buckets(
        strategy, max_batch=largest, minimum=smallest, step=step, limit=limit, manual=manual
    )
    assert list(sizes) == manager.decode_batch_buckets
    for batch in range(1, largest + 1):
        assert bucket_for(batch, sizes) == manager.find_decode_batch_bucket(batch)
