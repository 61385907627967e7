"""The variables of other programs, against our settings and vLLM's defaults."""

import ast
import importlib
import importlib.util
import os
from pathlib import Path

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from deploy.launcher.settings import LaunchSettings
from gateway.settings import Settings as GatewaySettings
from protos.errors import ConfigurationRefused
from protos.service.environment import (
    FAMILIES,
    VARIABLES,
    Kind,
    Reading,
    check,
    check_for_service,
    names,
    read,
)
from protos.service.redaction import HIDDEN
from protos.service.settings import declared, load, reference_variables
from scheduler_svc.settings import Settings as SchedulerSettings
from worker_svc.settings import Settings as WorkerSettings
from worker_svc.vllm_platform import PLATFORM_VARIABLE

SERVICES = (GatewaySettings, SchedulerSettings, WorkerSettings)


def reported(environment: dict[str, str]) -> list[Reading]:
    found: list[Reading] = []
    check(environment, found.append)
    return found


def test_mapped_variables_are_those_of_the_settings() -> None:
    aliases = {
        name: f"--{field.replace('_', '-')}"
        for cls in SERVICES
        for field in cls.model_fields
        for name in reference_variables(cls, field)
    }
    aliases |= {
        name: f"--no-{field.replace('_', '-')}"
        for cls in SERVICES
        for field, name in declared(cls, "reference_opposites").items()
    }
    assert {name: row.flag for name, row in VARIABLES.items() if row.kind is Kind.MAPPED} == aliases
    assert all(name.startswith(FAMILIES) for name in VARIABLES)


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("VLLM_RBLN_USE_VLLM_MODEL", "0", "set 1 or unset it"),
        ("VLLM_RBLN_USE_VLLM_MODEL", "False", "set 1 or unset it"),
        ("VLLM_USE_MODELSCOPE", "true", "pass its folder"),
        ("VLLM_MODEL_REDIRECT_PATH", "/models.json", "pass the folder"),
        ("VLLM_RBLN_NUM_HIDDEN_LAYERS", "4", "set 0 or unset it"),
        ("VLLM_RBLN_ENFORCE_MODEL_FP32", "1", "use --dtype float32"),
        ("VLLM_RBLN_COMPILE_MODEL", "0", "use --backend eager"),
        ("VLLM_RBLN_USE_W8A8", "1", "unset it"),
        ("VLLM_BATCH_INVARIANT", "1", "unset it"),
    ],
)
def test_a_variable_that_would_change_answers_is_rejected(name: str, value: str, advice: str) -> None:
    found: list[Reading] = []
    with pytest.raises(ConfigurationRefused) as refused:
        check({name: value, "VLLM_PLUGINS": "rbln"}, found.append)
    text = refused.value.message
    assert text.startswith(f"{name}={value} is not supported: ")
    assert advice in text
    assert "\n" not in text
    assert not found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_RBLN_USE_VLLM_MODEL", "1"),
        ("VLLM_USE_MODELSCOPE", "0"),
        ("VLLM_RBLN_DECODE_BATCH_BUCKET_STRATEGY", "exp"),
        ("RBLN_USE_CUSTOM_KERNEL", "1"),
        ("VLLM_RBLN_DISABLE_MM", "1"),
        ("RBLN_PROFILER", "1"),
        ("RBLN_ROOT_IP", "10.0.0.1"),
        ("RBLN_LOCAL_IP", "10.0.0.2"),
        *((name, "1") for name in names("torch-rbln") if name.startswith("TORCH_RBLN_")),
        ("VLLM_NO_USAGE_STATS", "1"),
        ("VLLM_USE_V1", ""),
        ("VLLM_PORT_8000_TCP_ADDR", "10.0.0.1"),
        ("VLLM_ROUTER_SERVICE_HOST", "10.0.0.1"),
        ("PATH", "/bin"),
        ("TRIPTYCH_MAX_NUM_SEQS", "4"),
    ],
)
def test_nothing_is_said_about_variables_with_their_usual_meaning(name: str, value: str) -> None:
    """Mapped and native variables, empty variables, links to services of Kubernetes, and those of others."""
    assert not reported({name: value})


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("VLLM_PLUGINS", "rbln", "=rbln has no effect here"),
        ("VLLM_SPYRE_WARMUP_NEW_TOKENS", "20", "=20 has no effect here"),
        ("TRIPTYCH_MAX_NUM_SEQZ", "3", " is unknown and has no effect here; did you mean TRIPTYCH_MAX_NUM_SEQS?"),
        ("RBLN_NPUS_PER_DEVICE", "2", "=2 has no effect here"),
        ("VLLM_RBLN_DECODE_BATCH_BUCKET_STRATGY", "exp", " is unknown and has no effect here; did you mean VLLM_RBLN_DEC"),
        ("RBLN_SOMETHING_ELSE", "1", " is unknown and has no effect here; an NPU's runtime"),
    ],
)  # fmt: skip
def test_an_ignored_variable_is_reported_in_one_line(name: str, value: str, text: str) -> None:
    """Misspelled names get the name that was meant."""
    (line,) = map(str, reported({name: value}))
    assert line.startswith(f"{name}{text}")
    assert "\n" not in line


def test_services_log_ignored_variables() -> None:
    with capture_logs() as logs:
        check_for_service(
            {
                "TRIPTYCH_PROT": "1",
                "VLLM_PLUGINS": "rbln",
                "VLLM_USE_V1": "1",
                "VLLM_RBLN_USE_VLLM_MODEL": "1",
            }
        )
    assert [(line["log_level"], line["variable"]) for line in logs] == [
        ("warning", "TRIPTYCH_PROT"),
        ("warning", "VLLM_PLUGINS"),
        ("warning", "VLLM_USE_V1"),
    ]


def test_secrets_are_hidden() -> None:
    """A key is shown as asterisks, also if its name is unknown."""
    readings = read({"VLLM_API_KEY": "sk-1", "VLLM_MY_ACCESS_KEY": "sk-2", "VLLM_CACHE_ROOT": "/cache"})
    assert {reading.name: reading.value for reading in readings} == {
        "VLLM_API_KEY": HIDDEN,
        "VLLM_CACHE_ROOT": "/cache",
        "VLLM_MY_ACCESS_KEY": HIDDEN,
    }
    assert not any("sk-" in str(reading) for reading in readings)


def values_that_start() -> dict[str, set[str]]:
    """Returns, for each variable that we read, vLLM's own default and the other spellings that vLLM takes."""
    values: dict[str, set[str]] = {name: {""} for name in VARIABLES}
    for name, default in vllm_defaults().items():
        values[name].add(default)
    for name in values:
        row = VARIABLES[name]
        if row.kind is Kind.MAPPED and is_switch(row.flag):
            values[name] |= {"0", "1", "true", "True", "FALSE", "false", " 1 "}
    values["VLLM_LOGGING_LEVEL"] |= {"WARN", "warn", "FATAL", "CRITICAL", "Info", "notset", "DEBUG", "ERROR"}
    for name in ("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "VLLM_XGRAMMAR_CACHE_MB", "VLLM_CPU_KVCACHE_SPACE"):
        values[name].add("0")
    values["VLLM_LOG_BATCHSIZE_INTERVAL"] |= {"0", "-1"}
    values["VLLM_RBLN_DECODE_BATCH_BUCKET_STRATEGY"] |= {"Exponential", "exp", "LINEAR"}
    return values


def is_switch(flag: str) -> bool:
    field = flag.removeprefix("--no-").strip("-").replace("-", "_")
    return LaunchSettings.model_fields[field].annotation is bool


def vllm_defaults() -> dict[str, str]:
    """Returns the second argument of each `getenv` of vLLM's module that names a variable."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    module = ast.parse((Path(spec.origin).parent / "envs.py").read_text())
    calls = [node for node in ast.walk(module) if isinstance(node, ast.Call) and len(node.args) == 2]
    return {
        name.value: str(default.value)
        for name, default in (call.args for call in calls if ast.unparse(call.func).startswith("os."))
        if isinstance(name, ast.Constant)
        and isinstance(default, ast.Constant)
        and isinstance(name.value, str)
        if name.value in VARIABLES and default.value is not None
    }


def test_vllm_s_own_values_do_not_stop_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert vllm_defaults().keys() >= {"VLLM_LOGGING_LEVEL", "VLLM_CPU_KVCACHE_SPACE"}
    stopped = set()
    for name, values in values_that_start().items():
        for value in values:
            monkeypatch.setenv(name, value)
            try:
                check({name: value}, lambda _: None)
                if VARIABLES[name].kind in (Kind.MAPPED, Kind.NATIVE):
                    LaunchSettings(model="model")
            except (ConfigurationRefused, ValidationError) as error:
                stopped.add((name, value, str(error)))
        monkeypatch.delenv(name)
    assert not stopped


@pytest.mark.parametrize(
    ("first", "second", "agree"),
    [("1", "true", True), ("False", "0", True), ("on", "TRUE", True), ("1", "0", False)],
)
def test_two_names_of_one_switch_agree_in_any_spelling(
    monkeypatch: pytest.MonkeyPatch, first: str, second: str, agree: bool
) -> None:
    monkeypatch.setenv("RBLN_USE_CUSTOM_KERNEL", first)
    monkeypatch.setenv("VLLM_RBLN_USE_CUSTOM_KERNEL", second)
    if agree:
        assert load(LaunchSettings, []).rbln_use_custom_kernel is (first != "False")
        return
    with pytest.raises(ConfigurationRefused, match="set one setting, and differ"):
        load(LaunchSettings, [])


# Ends a service that starts nevertheless.
NOWHERE = "--host=256.0.0.1"


@pytest.mark.parametrize(
    ("command", "module", "flags"),
    [
        ("gateway", "gateway.__main__", [NOWHERE]),
        ("scheduler", "scheduler_svc.__main__", [NOWHERE]),
        ("worker", "worker_svc.__main__", ["--model=x", NOWHERE]),
        ("compile", "deploy.commands.compile", []),
        ("up", "deploy.commands.up", [NOWHERE]),
    ],
)
def test_a_refused_variable_stops_the_start(
    command: str,
    module: str,
    flags: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With exit code 2 and one line that says what to change."""
    # Earlier tests may have run a worker in this process. It has set variables, with which another one does
    # not look at the rest, and it has left threads of torch, with which another one ends the process.
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv(PLATFORM_VARIABLE, raising=False)
    monkeypatch.setenv("VLLM_RBLN_USE_VLLM_MODEL", "0")
    monkeypatch.setattr("structlog.configure", lambda **_: None)
    monkeypatch.setattr("worker_svc.__main__._uses_torch", lambda: False)
    assert importlib.import_module(module).main(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"triptych {command}: VLLM_RBLN_USE_VLLM_MODEL=0 is not supported: 1 is the only path"
    )
