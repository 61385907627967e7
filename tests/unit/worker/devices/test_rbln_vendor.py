"""Device rbln with the vendor's packages: tensors, copies, compiler and refusals."""

import subprocess
import sys
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.rbln import vendor_packages

pytestmark = pytest.mark.npu


@pytest.fixture(scope="module")
def observed() -> dict[str, Any]:
    """What a process with the packages saw; see `vendor_process`."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.rbln.vendor_process"],
        check=False, capture_output=True, text=True, cwd=ROOT, timeout=100, env=vendor_packages.environment(TORCH_RBLN_DISABLE_FALLBACK="all"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = vendor_packages.printed_json(done.stdout)
    return result


def test_blocks_are_cleared_and_copied_on_the_npu(observed: dict[str, Any]) -> None:
    assert len(observed["copies"]) == 4
    for found in observed["copies"]:
        assert found == {
            "device": "rbln",
            "fresh": False,
            "copied": True,
            "rest": False,
            "cleared": True,
            "untouched": True,
            "announced": "tensors",
        }


def test_weights_and_results_are_on_the_npu(observed: dict[str, Any]) -> None:
    """A tied weight is moved once, references follow, and nothing but graphs computes on the NPU."""
    found = observed["weights"]
    assert "aten::add.out ran outside of a graph" in found.pop("eager")
    assert found == {"devices": ["rbln"], "held": "rbln", "tied": True, "equal": True, "result": "rbln"}


def test_without_device_tensors_the_runtime_copies(observed: dict[str, Any]) -> None:
    """Its call copies every layer, so models with two KV groups cannot use it, nor can an older runtime."""
    assert observed["runtime_copies"] == {
        "expected": "runtime",
        "groups": "none",
        "early": "no graph has run yet, so there is no runtime that copies blocks",
        "copied": True,
        "rest": True,
        "ready": "runtime",
        "without_the_call": "none",
        "released": "runtime",
    }


def test_the_most_probable_tokens_are_found_on_the_npu(observed: dict[str, Any]) -> None:
    """The sampler is strict like the model. It keeps no code: the vendor's compiler cannot load it."""
    assert observed["sampler"] == {
        "device": "rbln",
        "equal": True,
        "options": [{"mode": ["strict"], "num_devices": 1, "model_trace_method": "export"}],
        "meta": True,
    }


def test_a_graph_is_compiled_once_for_each_shape(observed: dict[str, Any]) -> None:
    """A second start with the same shape adds no file to the compiler's cache."""
    assert observed["compile_cache"] == [1, 1, 2]


def test_a_graph_that_the_compiler_refuses_is_an_error(observed: dict[str, Any]) -> None:
    """The function does not run on the host instead, though torch_rbln would run it there."""
    assert "input 0 is a part of a tensor" in observed["failures"]["refused"]
    assert observed["failures"]["places_refused"] == []


def test_a_failed_step_does_not_run_again_on_the_host(observed: dict[str, Any]) -> None:
    """The second step of a graph fails in the runtime."""
    assert observed["failures"]["first"] == [4] * 5
    assert "the device is gone" in observed["failures"]["failed"]
    assert observed["failures"]["places"] == ["npu", "npu"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("alone", "RBLN-CR13 works alone; omit --rbln-num-devices-per-local-rank 2"),
        ("no_name", "the NPU does not report its name; set RBLN_TARGET_SOC"),
        ("no_target", "compiling without an NPU needs its name; set RBLN_TARGET_SOC"),
        ("triton", "triton_sliding_window_attention_naive (import of"),
    ],
)
def test_what_is_missing_is_named_in_one_line(observed: dict[str, Any], case: str, words: str) -> None:
    assert words in observed["refusals"][case]
    assert "\n" not in observed["refusals"][case]


def test_several_npus_work_as_one_device(observed: dict[str, Any]) -> None:
    """The runtime learns their number, and code for them has other keys."""
    assert observed["refusals"]["two"] == (
        "2, 2 x RBLN-CA25, device tensors, compiler kernels, the vendor's experts"
    )


def test_code_is_compiled_without_an_npu(observed: dict[str, Any]) -> None:
    """The target's name is enough; what such graphs return means nothing."""
    assert observed["refusals"]["blind"] == (
        "1 x RBLN-CA25, device tensors, compiler kernels, the vendor's experts, strict: True"
    )
