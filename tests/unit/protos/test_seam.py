"""The seam: generated stubs, errors on the wire, and the reading of settings."""

import json
import re
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from protos import errors
from protos.errors import TriptychError, from_proto
from protos.generate import ROOT, generate, stale
from protos.service.settings import load
from protos.triptych.v1 import common_pb2
from scheduler_svc.settings import Settings

ERRORS = [
    cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, TriptychError) and cls is not TriptychError
]


def test_a_changed_stub_is_noticed(tmp_path: Path) -> None:
    generate(tmp_path)
    package = tmp_path / "triptych" / "v1"
    (package / "common_pb2.py").write_text("changed")
    (package / "worker_pb2.pyi").unlink()
    assert stale(tmp_path) == ["common_pb2.py", "worker_pb2.pyi"]


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.proto")), ids=lambda path: path.name)
def test_every_enum_starts_with_unspecified(path: Path) -> None:
    for name, first in re.findall(r"enum (\w+) \{(?:\s*//[^\n]*)*\s*(\w+) = 0;", path.read_text()):
        assert first.endswith("UNSPECIFIED"), name


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_an_error_survives_the_wire(cls: type[TriptychError]) -> None:
    sent = cls("what and why", param="temperature", retry_after_ms=1500)
    received = from_proto(common_pb2.Error.FromString(sent.to_proto().SerializeToString()))
    assert type(received) is cls
    assert (received.message, received.param, received.retry_after_ms) == (
        "what and why",
        "temperature",
        1500,
    )


def test_every_code_of_the_schema_has_an_error_class_of_its_own() -> None:
    assert sorted(cls.code for cls in ERRORS) == sorted(set(common_pb2.ErrorCode.values()) - {0})
    for cls in ERRORS:
        assert cls.grpc_code is not grpc.StatusCode.OK
        assert cls.http_status >= 400


def test_a_code_of_a_newer_schema_is_internal() -> None:
    """An unknown code never becomes a success or a crash."""
    error = common_pb2.Error(message="new")
    error.code = 999  # type: ignore[assignment]
    assert type(from_proto(error)) is errors.Internal


def test_flags_come_before_variables_and_variables_before_reference_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_RBLN_DECODE_BATCH_BUCKET_STEP", "4")
    assert load(Settings, []).decode_bucket_step == 4
    monkeypatch.setenv("TRIPTYCH_DECODE_BUCKET_STEP", "3")
    assert load(Settings, []).decode_bucket_step == 3
    assert load(Settings, ["--decode-bucket-step", "5"]).decode_bucket_step == 5


def test_a_scheduler_with_a_bad_setting_exits_with_2_and_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scheduler_svc", "--port", "-1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("triptych scheduler: --port (TRIPTYCH_PORT)")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("package", ["protos", "scheduler_svc", "gateway", "deploy.cli"])
def test_the_torch_free_side_never_imports_torch_vllm_or_the_worker(package: str) -> None:
    """Every module of the package is imported in a fresh process. OpenTelemetry waits for its setting."""
    script = (
        "import importlib, json, pkgutil, sys\n"
        f"root = importlib.import_module({package!r})\n"
        "for module in pkgutil.walk_packages(getattr(root, '__path__', []), root.__name__ + '.'):\n"
        "    if not module.name.endswith('__main__') and module.name not in ('protos.generate', 'protos.service.tracing_export'):\n"
        "        importlib.import_module(module.name)\n"
        f"if {package!r} in ('scheduler_svc', 'gateway'): importlib.import_module({package!r} + '.__main__')\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'vllm', 'worker_svc', 'opentelemetry'})))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
