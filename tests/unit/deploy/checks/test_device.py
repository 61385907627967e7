"""`triptych doctor` in a process of its own, as vLLM loads one platform per process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.commands.doctor import main
from tests.support import tiny_models
from tests.support.paths import ROOT
from tests.support.rbln.vendor_packages import environment

Found = tuple[int, dict[str, tuple[str, str]]]
"""The exit code, and each check's status and text."""


def doctor(*flags: str, on_npu: bool = False, **variables: str) -> Found:
    own = environment() if on_npu else {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "deploy.cli", "doctor", *flags], check=False, capture_output=True, text=True,
        cwd=ROOT, timeout=100,
        env={**own, **variables},
    )  # fmt: skip
    lines = [
        line for line in done.stdout.splitlines() if line[:8].strip() in ("ok", "note", "FAILED", "skipped")
    ]
    assert lines, done.stderr
    return done.returncode, {line[8:28].strip(): (line[:8].strip(), line[28:]) for line in lines}


def test_a_rank_is_checked_alone() -> None:
    code, found = doctor("--device", "cpu", "--tensor-parallel-size", "2")
    assert (code, found["attention"][0]) == (0, "ok")


def test_missing_vendor_packages_are_one_failure() -> None:
    """Without an NPU's software the worker would refuse to start; nothing runs on the device."""
    code, found = doctor("--device", "rbln")
    assert code == 2
    assert found["worker"][0] == "FAILED"
    assert "rebel and torch_rbln" in found["worker"][1]
    assert "attention" not in found


@pytest.fixture(scope="module")
def with_the_vendors_packages(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What a doctor finds that runs all checks with the vendor's packages."""
    code = str(tmp_path_factory.mktemp("code"))
    return doctor("--device", "rbln", "--parity", "--compile-cache-dir", code, on_npu=True)


@pytest.mark.npu
def test_the_vendors_stack_is_checked(with_the_vendors_packages: Found) -> None:
    """The checks run through the code that an NPU would meet."""
    code, found = with_the_vendors_packages
    assert {name for name, (status, _) in found.items() if status in ("FAILED", "skipped")} == set()
    assert code == 0
    assert found["kept code"] == ("ok", "1 file for a graph, kept for later starts")


@pytest.mark.npu
@pytest.mark.slow
def test_triton_kernels_are_checked() -> None:
    code, found = doctor("--device", "rbln", on_npu=True, RBLN_USE_CUSTOM_KERNEL="1")
    assert code == 0, found
    assert "differs from the CPU" in found["attention"][1]


PARITY = (
    "model", "reference", "prefill", "decode, 1 row", "decode, 2 rows", "decode, 4 rows", "prefix hits",
)  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "reused"),
    [
        pytest.param(("--device", "cpu"), 448, marks=pytest.mark.slow),
        pytest.param(("--device", "rbln", "--rbln-backend", "rbln-check"), 384, marks=pytest.mark.slow),
    ],
    ids=["cpu", "rbln-check"],
)
def test_a_made_up_model_equals_the_reference(flags: tuple[str, ...], reused: int) -> None:
    """Chunks, every bucket and prefix hits agree with transformers, to a few rounding errors."""
    check_parity(doctor("--parity", "--no-compile-cache", *flags), reused)


def test_a_made_up_model_equals_the_reference_with_the_vendors_packages(
    with_the_vendors_packages: Found,
) -> None:
    """It does through the code that an NPU would meet, too."""
    check_parity(with_the_vendors_packages, 384)


def check_parity(result: Found, reused: int) -> None:
    code, found = result
    assert code == 0
    assert [found[name][0] for name in PARITY] == ["ok"] * len(PARITY)
    assert "prefix hits" in found
    assert f"{reused} tokens reused; greedy tokens agree" in found["prefix hits"][1]


@pytest.mark.npu
@pytest.mark.slow
def test_a_chip_that_computes_float16_in_bfloat16_is_held_to_bfloat16(tmp_path: Path) -> None:
    """Held to float16, whose rounding is an eighth, such a chip would fail."""
    flags = ("--device", "rbln", "--parity", "--dtype", "float16", "--compile-cache-dir", str(tmp_path))
    result = doctor(*flags, on_npu=True, FAKE_REBEL_TYPE="bfloat16")
    check_parity(result, 384)
    assert result[1]["precision"] == ("ok", "float32 is computed in bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "mixtral"])
def test_windows_and_experts_run_through_the_fakes(family: str, tmp_path: Path) -> None:
    """Kept windows are reused, and every graph of an expert model has the vendor's operator."""
    folder = tiny_models.write(family, tmp_path / "model")
    code, found = doctor(
        "--device", "rbln", "--parity", "--model", str(folder), "--dtype", "float32",
        "--compile-cache-dir", str(tmp_path / "code"), on_npu=True,
    )  # fmt: skip
    assert code == 0
    assert [found[name][0] for name in PARITY] == ["ok"] * len(PARITY)
    assert ("windows included" in found["prefix hits"][1]) == (family == "gemma3")
    graphs = [path.read_text() for path in (tmp_path / "code").rglob("*.rbln")]
    # Two prefill and three decode buckets; output heads are graphs of their own.
    assert sum("custom_moe_glu" in graph for graph in graphs) == (5 if family == "mixtral" else 0)


@pytest.mark.slow
def test_worker_that_cannot_copy_is_a_note(tmp_path: Path) -> None:
    """Where the runtime owns several kinds of caches nothing is reused, and nothing fails."""
    folder = tiny_models.write("gemma3", tmp_path)
    code, found = doctor(
        "--device", "rbln", "--parity", "--model", str(folder), "--dtype", "float32", "--no-compile-cache",
        "--no-rbln-use-device-tensor", on_npu=True,
    )  # fmt: skip
    assert code == 0
    assert found["prefix hits"][0] == "note"
    assert "nothing was reused, because the worker cannot copy blocks" in found["prefix hits"][1]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--model", "smollm2"), "only --parity runs a model"),
        (("--parity", "--compile-only"), "omit --compile-only"),
        (("--parity", "--load-format", "dummy"), "omit --compile-only"),
        (("--parity", "--tensor-parallel-size", "2"), "omit --compile-only"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(
    flags: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(flags)) == 2
    assert reason in capsys.readouterr().err
