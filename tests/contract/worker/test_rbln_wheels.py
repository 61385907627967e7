"""Device rbln emits the operators that the vendor's plugin calls, according to the sources of its wheels."""

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from protos.steps import GroupKind
from tests.support.rbln.vendor_packages import FAKES
from tests.support.rbln.wheels import PRE_RELEASES, VERSIONS, Call, IndexUnreachable, Wheel
from worker_svc.devices.attention import AttentionCall, AttentionParams, InPlaceInput, PagedInput, StepInput
from worker_svc.devices.rbln import operators
from worker_svc.devices.rbln.device import _HEAD_SIZES, RblnDevice
from worker_svc.devices.rbln.operators import CUSTOM, NAMESPACES, SIGNATURES, TRITON, Namespace
from worker_svc.devices.rbln.vendor import TRITON_MODULES, Vendor
from worker_svc.devices.registry import DeviceOptions
from worker_svc.shapes import AttentionLayer, KvGroup

pytestmark = [pytest.mark.contract, pytest.mark.npu]

BACKEND = "vllm_rbln/v1/attention/backends/flash_attention.py"
# A keyword of 0.12.1's custom operators, read from their schemas.
KEYWORD = "is_prompt_sorted"
# Out of scope: latent, sparse and masked attention are not supported, and the others are not attention.
MASKED = ("flash_attention_naive", "attention_naive")
OTHERS = ("paged_flash_causal_mla", "sparse_attn", "custom_moe", "ccl_", *MASKED)


AS_INFORMATION = pytest.mark.xfail(reason="a pre-release tells what the next release may need", strict=False)


@pytest.fixture(
    scope="module", params=[*VERSIONS, *(pytest.param(each, marks=AS_INFORMATION) for each in PRE_RELEASES)]
)
def wheel(request: pytest.FixtureRequest) -> Wheel:
    try:
        return Wheel(request.param)
    except IndexUnreachable as error:
        pytest.skip(f"the package index that has vllm-rbln {request.param} cannot be reached: {error}")


def is_newest(wheel: Wheel) -> bool:
    return "vllm_rbln/v1/attention/ops/sliding_window_attention.py" in wheel.sources


def attention_calls(wheel: Wheel, namespace: Namespace) -> dict[str, Call]:
    """Returns the plugin's call of each operator; all calls of one operator have the same form."""
    found: dict[str, Call] = {}
    for call in wheel.calls(namespace):
        if not call.operator.startswith(OTHERS):
            assert set(call.keywords) <= {KEYWORD}
            assert found.setdefault(call.operator, call) == call
    return found


def roles_of(operator: str, arguments: tuple[str, ...]) -> list[str]:
    """Returns the roles of a call's arguments. The plugin passes the scale twice, once as a dummy."""
    roles = list(arguments)
    if operator == "sliding_window_attention_v1":
        assert roles[8:10] == ["True", "None"]
        roles[8:10] = ["is_causal", "attn_mask"]
    elif roles.count("scale") == 2:
        roles[len(roles) - 1 - roles[::-1].index("scale")] = "dummy"
    return roles


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_every_call_of_the_plugin_fits_our_signature(wheel: Wheel, namespace: Namespace) -> None:
    calls = attention_calls(wheel, namespace)
    ours = {operator: [a.role for a in arguments] for operator, arguments in SIGNATURES[namespace].items()}
    expected = set(ours) if is_newest(wheel) else set(ours) - {"sliding_window_attention_v1"}
    assert set(calls) == expected
    for operator, call in calls.items():
        theirs = roles_of(operator, call.arguments)
        if is_newest(wheel):
            assert theirs == ours[operator], operator
        else:
            assert theirs == ours[operator][: len(theirs)], operator
            assert set(ours[operator][len(theirs) :]) <= {
                "k_quantize_scale",
                "v_quantize_scale",
                "cache_dtype",
            }


def test_triton_operators_are_declared_as_ours(wheel: Wheel) -> None:
    declared = [each for each in wheel.declarations(TRITON) if not each.operator.startswith(MASKED)]
    assert {found.operator for found in declared} == set(SIGNATURES[TRITON])
    for found in declared:
        assert list(found.names) == [argument.name for argument in SIGNATURES[TRITON][found.operator]]
        assert set(found.annotations) == {"torch.Tensor"}
        assert found.operator.endswith(("_prefill", "_decode"))


def test_custom_operators_are_the_runtime_s(wheel: Wheel) -> None:
    """Neither wheel declares them, so our argument names come from the calls."""
    assert wheel.declarations(CUSTOM) == []


def test_cache_layouts_are_ours(wheel: Wheel) -> None:
    """The block dimension matches in each namespace; the older plugin uses the Triton layout for both."""
    devices = {
        namespace: RblnDevice(DeviceOptions("rbln-check", rbln_use_custom_kernel=namespace == TRITON))
        for namespace in NAMESPACES
    }
    group = group_of(GroupKind.FULL)
    assert devices[TRITON].cache_shape(group, 7, 1024) == (2, 7, 2, 1, 1024, 64)
    assert devices[CUSTOM].cache_shape(group, 7, 1024) == (7, 2, 2, 1, 1024, 64)
    if not is_newest(wheel):
        expected = "(2, num_blocks, num_kv_heads, 1, block_size, head_size)"
        assert wheel.returned(BACKEND, "get_kv_cache_shape") == expected
        return
    axis = wheel.returned("vllm_rbln/v1/attention/kv_cache_bindings.py", "attention_block_axis")
    assert axis == f"{devices[TRITON].block_dim} if use_custom_kernel else {devices[CUSTOM].block_dim}"
    source = ast.unparse(wheel.function(BACKEND, "get_kv_cache_shape"))
    assert "shape = [2, num_kv_heads, 1, block_size, head_size]" in source
    assert "shape.insert(axis, num_blocks)" in source


def test_head_sizes_are_those_of_the_kernels(wheel: Wheel) -> None:
    sizes = ast.literal_eval(wheel.returned(BACKEND, "get_supported_head_sizes"))
    assert tuple(sizes) == _HEAD_SIZES


def test_the_variable_that_chooses_kernels_is_the_plugin_s(wheel: Wheel) -> None:
    from protos.service.settings import reference_variables
    from worker_svc.settings import Settings

    name, _ = reference_variables(Settings, "rbln_use_custom_kernel")
    assert f"os.environ.get('{name}', 'False')" in ast.unparse(wheel.module("vllm_rbln/envs.py"))


def test_collectives_are_set_up_as_the_plugin_sets_them_up(wheel: Wheel) -> None:
    """The backend of process groups, the variables that it reads, and the compiler's option."""
    source = "\n".join(ast.unparse(module) for module in wheel.modules_with("LOCAL_RANK", "process_group"))
    assert "os.environ['LOCAL_RANK'] = str(rank)" in source
    assert "os.environ['WORLD_SIZE'] = str(world_size)" in source
    assert "os.environ['RCCL_PORT_GEN'] = '1'" in source
    assert f"'{RblnDevice().collectives}'" in source
    assert "process_group_dict" in source


def test_expert_layers_are_called_as_the_plugin_calls_them(wheel: Wheel) -> None:
    calls = [call for call in wheel.calls(CUSTOM) if call.operator == operators.EXPERTS]
    assert calls
    assert all(call.arguments == operators.EXPERT_ARGUMENTS and not call.keywords for call in calls)


def test_the_sampler_is_compiled_as_the_plugin_compiles_it(wheel: Wheel) -> None:
    """The plugin finds the most probable tokens with our operator, and keeps no code of its sampler."""
    if not is_newest(wheel):
        return
    module = "vllm_rbln/v1/sample/rbln_sampler.py"
    assert wheel.returned(module, "rbln_greedy_sample") == "torch.ops.rbln.argmax(logits)"
    compiled = ast.unparse(wheel.function(module, "compile_sampler"))
    assert "num_devices=1 if use_device_tensor" in compiled.lower()
    assert "use_cache=False" in compiled


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the calls of attention operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, operator = func._schema.name.partition("::")
        if namespace in NAMESPACES:
            assert not kwargs  # torch omits a keyword with its default value
            self.calls.append((namespace, operator, args))
        return func(*args, **kwargs or {})


def group_of(kind: GroupKind) -> KvGroup:
    window = 0 if kind is GroupKind.FULL else 256
    return KvGroup(0, (AttentionLayer("a", 6, 2, 64, window, torch.float32),), kind)


def steps(kind: GroupKind, partitions: int) -> Iterator[StepInput]:
    """Yields a prefill chunk and a decode step with a padded row."""
    one, two = torch.ones((1, 1), dtype=torch.int32), torch.ones((2, 1), dtype=torch.int32)
    if kind is GroupKind.IN_PLACE_WINDOW:
        yield InPlaceInput(one * 5, one * 9, one, 4)
        yield InPlaceInput(two * 5, two * 6, two * torch.tensor([[1], [0]]).int(), 1)
        return
    tables = torch.zeros((2, partitions), dtype=torch.int32)
    tables[0] = 1
    yield PagedInput(one[0] * 7, torch.tensor([0, 3]).int(), tables[:1], torch.zeros(4).long(), 3)
    yield PagedInput(two[:, 0] * 8, torch.tensor([0, 1, 2]).int(), tables, torch.zeros(2).long(), 2)


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_what_the_device_emits_is_what_the_plugin_calls(wheel: Wheel, namespace: Namespace) -> None:
    calls = attention_calls(wheel, namespace)
    device = RblnDevice(DeviceOptions("rbln-check", rbln_use_custom_kernel=namespace == TRITON))
    device.check_available()
    kinds = [GroupKind.FULL, GroupKind.IN_PLACE_WINDOW]
    if namespace == CUSTOM and is_newest(wheel):
        kinds.append(GroupKind.PAGED_WINDOW)
    emitted = set()
    with_sinks = (False, True) if namespace == CUSTOM else (False,)
    for kind, partitions, sinks in itertools.product(kinds, (1, 2), with_sinks):
        group = group_of(kind)
        params = AttentionParams(6, 2, 64, 0.125, group.window, 0.0, writes=True, sinks=sinks)
        device.check_attention(params)
        cache = torch.zeros(device.cache_shape(group, 3, 1024))
        for step in steps(kind, partitions):
            plan = device.plan(group, 1024, step)
            tokens = plan.rows * plan.query_len
            query, key = torch.randn((tokens, 6, 64)), torch.randn((tokens, 2, 64))
            with Recorder() as recorder:
                output = torch.empty_like(query)
                device.attend(
                    AttentionCall(params, query, key, key, cache, output, torch.zeros(6) if sinks else None),
                    plan,
                )
            ((used, operator, arguments),) = recorder.calls
            assert used == namespace
            emitted.add(operator)
            given = dict(zip(roles_of(operator, calls[operator].arguments), arguments, strict=False))
            assert given["kv_cache"].data_ptr() == cache.data_ptr()
            assert given["q"].shape == (plan.rows, 2, 3, plan.query_len, 64)
            assert given["k"].shape == given["v"].shape == (plan.rows, 2, 1, plan.query_len, 64)
            assert given["scale"].item() == 0.125
            if "dummy" in given:
                assert given["dummy"] is given["scale"]
            for role in ("seq_idx", "cache_seq_len", "cache_offset", "block_tables"):
                if role in given:
                    assert given[role] is getattr(plan, role)
                    assert given[role].dtype == (torch.int32 if namespace == TRITON else torch.int64)
            if kind is GroupKind.PAGED_WINDOW:
                assert given["window_size"] == 256
            # With sinks the plugin never uses the single-block kernels.
            assert not (sinks and operator.startswith("causal_"))
            assert (given["sinks"].shape == (6, 1)) if sinks else given.get("sinks") is None
            for role in ("attn_mask", "k_quantize_scale", "v_quantize_scale", "cache_dtype"):
                assert given.get(role) is None
    masked = {name for name in calls if "mask" in roles_of(name, calls[name].arguments)}
    assert emitted == set(calls) - masked


def test_the_triton_operators_are_declared_by_the_modules_that_a_worker_imports(wheel: Wheel) -> None:
    declared = {
        node.value.partition("::")[2]
        for name in TRITON_MODULES
        for node in ast.walk(wheel.module(f"{name.replace('.', '/')}.py"))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith(f"{TRITON}::")
    }
    kernels = ("causal_attention_naive", "flash_causal_attention_naive", "sliding_window_attention_naive")
    assert declared == {f"{kernel}_{phase}" for kernel in kernels for phase in ("prefill", "decode")}


def test_the_compiler_gets_options_that_the_plugin_passes(wheel: Wheel) -> None:
    """So does the fake of the compiler: it takes the newest plugin's options and no others."""
    passed = {
        str(node.args[0].value)
        for node in ast.walk(wheel.module("vllm_rbln/compilation/compiler.py"))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "set_option"
        and isinstance(node.args[0], ast.Constant)
    }
    for tensors in (False, True):
        vendor = Vendor(DeviceOptions(rbln_use_device_tensor=tensors))
        vendor._context = object()
        assert {*vendor._compile_options(Path("folder"))} <= passed
    (taken,) = (
        ast.literal_eval(node.value.args[0])
        for node in ast.parse((FAKES / "rebel" / "core" / "torch_compile.py").read_text()).body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.targets[0]) == "OPTIONS"
    )
    assert passed - {"guard_filter_fn"} <= {*taken}
    if is_newest(wheel):
        assert passed - {"guard_filter_fn"} == {*taken}
