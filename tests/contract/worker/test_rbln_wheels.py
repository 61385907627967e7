"""Device rbln emits the operators that the vendor's plugin calls, according to the sources of its wheels."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.operator_calls import OperatorCalls
from tests.support.rbln.vendor_packages import FAKES
from tests.support.rbln.wheels import PRE_RELEASES, VERSIONS, Call, Wheel
from worker_svc.devices.rbln import operators
from worker_svc.devices.rbln.bound_graph import CallRecorder
from worker_svc.devices.rbln.device import RblnDevice
from worker_svc.devices.rbln.operators import CUSTOM, NAMESPACES, SIGNATURES, Namespace
from worker_svc.devices.rbln.vendor import Vendor
from worker_svc.devices.registry import DeviceOptions

pytestmark = [pytest.mark.contract, pytest.mark.npu]

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
    return Wheel(request.param)


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


def test_custom_operators_are_the_runtime_s(wheel: Wheel) -> None:
    """Neither wheel declares them, so our argument names come from the calls."""
    assert wheel.declarations(CUSTOM) == []


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
    if is_newest(wheel):
        # By name of a process group, its ranks in the default group, as in `RankGroup.stage`.
        described = wheel.returned("vllm_rbln/compilation/compiler.py", "build_process_group_dict")
        assert "tp.device_group.group_name: tp.ranks" in described


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


def test_tokens_are_drawn_with_the_plugin_s_call(wheel: Wheel) -> None:
    """The plugin's function and ours pass equal tensors in the same order; both cap top-p equally."""
    if not is_newest(wheel):
        return
    operators.register_all()
    source = wheel.function("vllm_rbln/v1/sample/rbln_sampler.py", "rbln_top_k_top_p_sample")
    names: dict[str, Any] = {"torch": torch}
    exec(ast.unparse(source), names)  # noqa: S102 - the function needs none of its module's imports
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    temperature, top_p = torch.tensor([0.5, 1.0, 2.0]), torch.tensor([0.9, 0.5, 0.995])
    top_k = torch.tensor([5, 1, 20], dtype=torch.int32)
    calls = []
    for function in (names["rbln_top_k_top_p_sample"], operators.emit_top_k_top_p):
        with OperatorCalls(operators.SAMPLER_NAMESPACE) as found:
            function(logits.clone(), temperature, top_k, top_p)
        ((operator, arguments),) = found.calls
        assert operator == f"{operators.SAMPLER_NAMESPACE}::{operators.TOP_K_TOP_P}"
        calls.append(arguments)
    for theirs, ours in zip(*calls, strict=True):
        assert theirs.dtype == ours.dtype
        assert torch.equal(theirs, ours)
    forms = ast.unparse(wheel.module("vllm_rbln/v1/sample/ops/top_k_top_p.py"))
    assert f"TOP_P_CLAMP = {operators.MAX_TOP_P}" in forms
    assert "vocab_size, dtype=torch.int32, device=device)" in forms
    assert "TOP_P_CLAMP, dtype=torch.float32, device=device)" in forms


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
        vendor = Vendor(DeviceOptions(rbln_use_device_tensor=tensors), CallRecorder())
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
