"""The NPU's attention operators: arguments, refusals, types. `test_rbln` compares their results."""

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from protos.errors import ConfigurationRefused
from tests.support.worker.sampling import chi_square_p
from worker_svc.devices.rbln import operators
from worker_svc.devices.rbln.device import RblnDevice
from worker_svc.devices.rbln.operators import CUSTOM, NAMESPACES, SIGNATURES, TRITON, Namespace
from worker_svc.devices.registry import DeviceOptions

KV_HEADS, GROUPS, BLOCK, SIZE = 2, 3, 8, 8


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    operators.register_all()


def integers(namespace: Namespace, values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32 if namespace == TRITON else torch.int64)


def arguments(namespace: Namespace, query_len: int, start: int = 0) -> dict[str, Any]:
    """Random states of a row in block 1 of an empty cache, and the arguments that operators take."""
    generator, scale = torch.Generator().manual_seed(0), torch.tensor(0.4)
    cache = [2, KV_HEADS, 1, BLOCK, SIZE]
    cache.insert(1 if namespace == TRITON else 0, 12)
    query, key, value = (
        torch.randn((1, KV_HEADS, groups, query_len, SIZE), generator=generator) for groups in (GROUPS, 1, 1)
    )
    return {
        "q": query, "k": key, "v": value, "kv_cache": torch.zeros(cache), "scale": scale, "dummy": scale,
        "seq_idx": integers(namespace, [[start]]),
        "block_tables": integers(namespace, [1] if query_len > 1 else [[1]]),
        "cache_seq_len": integers(namespace, [[start]]),
        "cache_offset": integers(namespace, [[start + query_len]]),
        "window_size": 4, "is_causal": True,
    }  # fmt: skip


def emit(namespace: Namespace, operator: str, by_role: dict[str, Any]) -> torch.Tensor:
    return operators.emit(operators.call_form(namespace, operator), by_role)


def test_results_have_the_querys_type() -> None:
    given = arguments(CUSTOM, 4)
    half = {
        role: value.bfloat16() if role in ("q", "k", "v", "kv_cache") else value
        for role, value in given.items()
    }
    rounded = {
        role: value.float() if role in ("q", "k", "v", "kv_cache") else value for role, value in half.items()
    }
    result = emit(CUSTOM, "flash_causal_attention_naive_prefill", half)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, emit(CUSTOM, "flash_causal_attention_naive_prefill", rounded).bfloat16())


WRONG: list[tuple[str, str, Any, str]] = [
    ("flash_causal_attention_naive_prefill", "block_tables", torch.zeros((1, 2), dtype=torch.int32), "block_tables must be"),
    ("flash_causal_attention_naive_prefill", "seq_idx", torch.zeros(1, dtype=torch.int32), r"seq_idx must be \[1, 1\]"),
    ("flash_causal_attention_naive_prefill", "scale", torch.zeros(1), "scale must be a scalar"),
    ("flash_causal_attention_naive_prefill", "k", torch.zeros((1, 2, 3, 4, SIZE)), "k must be"),
    ("flash_causal_attention_naive_decode", "q", torch.zeros((1, 2, 3, 4, SIZE)), "one token a row"),
    ("causal_attention_naive_prefill", "block_tables", torch.zeros(2, dtype=torch.int32), "one partition"),
]  # fmt: skip


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize(("operator", "role", "value", "message"), WRONG)
def test_wrong_shapes_are_refused(
    namespace: Namespace, operator: str, role: str, value: Any, message: str
) -> None:
    given = arguments(namespace, 4) | {role: value}
    with pytest.raises(ValueError, match=message):
        emit(namespace, operator, given)
    on_meta = {
        role: value.to("meta") if isinstance(value, torch.Tensor) else value for role, value in given.items()
    }
    with pytest.raises(ValueError, match=message):
        emit(namespace, operator, on_meta)


def test_cache_layouts_are_not_mixed_up() -> None:
    given = arguments(CUSTOM, 4)
    with pytest.raises(ValueError, match="kv_cache must be"):
        emit(TRITON, "flash_causal_attention_naive_prefill", given)
    given["kv_cache"] = given["kv_cache"].transpose(0, 1)
    with pytest.raises(ValueError, match=r"seq_idx must be torch\.int32|block_tables must be torch\.int32"):
        emit(TRITON, "flash_causal_attention_naive_prefill", given)


@pytest.mark.parametrize(
    ("operator", "role", "value", "message"),
    [
        ("flash_causal_attention_naive_prefill", "cache_dtype", torch.float8_e4m3fn, "8-bit"),
        ("sliding_window_attention_v1", "is_causal", False, "causality"),
        ("sliding_window_attention_v1", "attn_mask", torch.ones(4), "masks"),
    ],
)
def test_options_without_a_reference_are_refused(operator: str, role: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        emit(CUSTOM, operator, arguments(CUSTOM, 4) | {role: value})


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_every_operator_is_a_valid_torch_operator(namespace: Namespace) -> None:
    """Fakes return the shapes of the real results. Triton schemas hide mutations, as the vendor's do."""
    for operator in SIGNATURES[namespace]:
        given = arguments(namespace, 1 if operator.endswith("decode") else 4, start=2)
        values = tuple(given.get(argument.role) for argument in SIGNATURES[namespace][operator])
        packet = getattr(getattr(torch.ops, namespace), operator)
        checks = ("test_faketensor",) if namespace == TRITON else ("test_schema", "test_faketensor")
        torch.library.opcheck(packet.default, values, test_utils=checks)


RELEASE = cast("Namespace", "rbln_test_ops")
DECODE = "causal_attention_naive_decode"
STATES = "Tensor q, Tensor k, Tensor v, Tensor(a!) kv_cache"


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Declares an operator with the given arguments, as a release of the vendor might."""
    monkeypatch.setitem(SIGNATURES, RELEASE, SIGNATURES[CUSTOM])
    with torch.library._scoped_library(RELEASE, "FRAGMENT") as library:
        yield lambda arguments: library.define(f"{DECODE}({arguments}) -> Tensor")


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        # vllm-rbln 0.12.0.
        (f"{STATES}, Tensor seq_idx, Tensor scale, Tensor block_tables, Tensor dummy, Tensor? sinks=None",
         ["seq_idx", "scale", "block_tables", "dummy", "sinks"]),
        # Its pre-release 0.12.1a8.
        (f"{STATES}, Tensor seq_idx, Tensor scale, Tensor block_tables, Tensor dummy, Tensor? sinks=None, *, bool is_prompt_sorted=False",
         ["seq_idx", "scale", "block_tables", "dummy", "sinks", "is_prompt_sorted"]),
        # Unknown names have the roles of their places, known ones their own.
        (f"{STATES}, Tensor qk_scale, Tensor seq_idx, Tensor block_table, Tensor unused, Tensor? sinks=None, int other=3, bool is_prompt_sorted=False",
         ["scale", "seq_idx", "block_tables", "dummy", "sinks", None, "is_prompt_sorted"]),
    ],
    ids=["release", "pre-release", "reordered"],
)  # fmt: skip
def test_arguments_follow_the_registered_schema(
    declared: Callable[[str], None], schema: str, expected: list[str | None]
) -> None:
    declared(schema)
    calls: list[tuple[Any, ...]] = []

    class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append((*args, *(kwargs or {}).values()))
            return args[0]

    given = arguments(CUSTOM, 1) | {"sinks": torch.zeros(6, 1), "is_prompt_sorted": True}
    with Recorder():  # type: ignore[no-untyped-call]
        emit(RELEASE, DECODE, given)
    (call,) = calls
    for value, role in zip(call, ["q", "k", "v", "kv_cache", *expected], strict=True):
        assert value == 3 if role is None else value is given[role], role


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (f"{STATES}, Tensor seq_idx, Tensor scale, Tensor block_tables, Tensor dummy, Tensor? sinks, Tensor gate",
         "requires the unknown argument gate"),
        (f"{STATES}, Tensor seq_idx, Tensor scale, Tensor block_tables, Tensor dummy", "lacks the argument sinks"),
    ],
)  # fmt: skip
def test_operators_that_need_other_arguments_are_refused(
    declared: Callable[[str], None], schema: str, message: str
) -> None:
    declared(schema)
    with pytest.raises(ConfigurationRefused, match=f"{RELEASE}::{DECODE} {message}"):
        operators.call_form(RELEASE, DECODE)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 40, 1.0), (0.5, 5, 1.0), (1.5, 40, 0.7), (0.8, 8, 0.6)]
)
def test_tokens_come_from_the_filtered_distribution(temperature: float, top_k: int, top_p: float) -> None:
    """The device caps top-p, then the operator filters as the sampler on the host does."""
    device = RblnDevice(DeviceOptions(rbln_backend="rbln-check", sampling_on_device=True))
    device.check_available()
    draw = device.compile_draw()
    assert draw is not None
    logits = torch.randn(40, generator=torch.Generator().manual_seed(2)) * 2
    count = 20_000
    torch.manual_seed(5)
    tokens = draw(
        logits.repeat(count, 1),
        torch.full((count,), temperature),
        torch.full((count,), top_k, dtype=torch.int32),
        torch.full((count,), top_p),
    )
    expected, ids = (logits.double() / temperature).softmax(dim=-1).sort(descending=True)
    expected[top_k:] = 0
    expected /= expected.sum()
    expected[expected.cumsum(dim=-1) - expected >= min(top_p, operators.MAX_TOP_P)] = 0
    probabilities = torch.zeros(40, dtype=torch.float64)
    probabilities[ids] = expected / expected.sum()
    assert chi_square_p(tokens, probabilities) > 1e-3


def test_the_device_draws_only_if_it_is_asked() -> None:
    assert RblnDevice(DeviceOptions(rbln_backend="rbln-check")).compile_draw() is None
