"""The table of variables of other stacks, against vLLM and against our settings."""

import ast
import importlib.util
from pathlib import Path

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from deploy.launcher.settings import LaunchSettings
from gateway.settings import Settings as GatewaySettings
from protos.environment import table, vllm_serving
from protos.environment.table import VARIABLES, check, check_for_service, read
from protos.environment.variable import HIDDEN, Kind
from protos.errors import ConfigurationRefused
from protos.settings import declared, load, reference_variables
from scheduler_svc.settings import Settings as SchedulerSettings
from worker_svc.settings import Settings as WorkerSettings

SERVICES = (GatewaySettings, SchedulerSettings, WorkerSettings)


def vllm_variables() -> set[str]:
    """Returns the VLLM_* variables of the installed vLLM, whose module is parsed and not imported."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    module = ast.parse((Path(spec.origin).parent / "envs.py").read_text())
    (names,) = (
        {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
        for node in module.body
        if isinstance(node, ast.AnnAssign)
        and ast.unparse(node.target) == "environment_variables"
        and isinstance(node.value, ast.Dict)
    )
    return {name for name in names if isinstance(name, str) and name.startswith("VLLM_")}


def test_every_variable_of_vllm_has_a_row() -> None:
    """None is missing, and none is stale, except those of older releases."""
    ours = {row.name for row in table.STACKS["vLLM"]}
    older = {row.name for row in vllm_serving.OLDER}
    assert ours - older == vllm_variables()


def test_no_variable_has_two_rows() -> None:
    """Each name is in one list, once."""
    assert len(VARIABLES) == sum(map(len, table.STACKS.values()))


def test_mapped_variables_are_those_of_the_settings() -> None:
    """Each alias of a setting has a row that names the setting's flag, and no other row does."""
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
    assert {row.name: row.ours for row in VARIABLES.values() if row.kind is Kind.MAPPED} == aliases


def test_rows_say_why() -> None:
    """All but mapped ones have a reason, and flags in it exist."""
    flags = {
        f"--{name.replace('_', '-')}" for cls in (*SERVICES, LaunchSettings) for name in cls.model_fields
    }
    for row in VARIABLES.values():
        assert row.name.startswith(table.FAMILIES)
        assert row.reason or row.kind is Kind.MAPPED, row
        assert bool(row.ours) == (row.kind is Kind.MAPPED), row
        named = {word.strip("():,;") for word in row.reason.split() if word.strip("(").startswith("--")}
        assert named <= flags, row


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
        ("VLLM_BATCH_INVARIANT", "1", "unset it"),
    ],
)
def test_what_would_change_answers_is_refused(name: str, value: str, advice: str) -> None:
    """In one line with what to do, and before anything is reported."""
    reported: list[table.Reading] = []
    with pytest.raises(ConfigurationRefused) as refused:
        check({name: value, "VLLM_PLUGINS": "rbln"}, reported.append)
    text = refused.value.message
    assert text.startswith(f"{name}={value} is not supported: ")
    assert advice in text
    assert "\n" not in text
    assert not reported


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_RBLN_USE_VLLM_MODEL", "1"),
        ("VLLM_RBLN_DECODE_BATCH_BUCKET_STRATEGY", "exp"),
        ("RBLN_USE_CUSTOM_KERNEL", "1"),
        ("VLLM_RBLN_DISABLE_MM", "1"),
        ("RBLN_PROFILER", "1"),
        ("VLLM_NO_USAGE_STATS", "1"),
        ("VLLM_USE_V1", ""),
        ("VLLM_PORT_8000_TCP_ADDR", "10.0.0.1"),
        ("VLLM_ROUTER_SERVICE_HOST", "10.0.0.1"),
        ("PATH", "/bin"),
    ],
)
def test_nothing_is_said_about_what_holds(name: str, value: str) -> None:
    """Mapped and honoured variables, empty ones, links to services of Kubernetes, and those of others."""
    reported: list[table.Reading] = []
    check({name: value}, reported.append)
    assert not reported


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("VLLM_PLUGINS", "rbln", "VLLM_PLUGINS=rbln has no effect: the worker loads its own platform"),
        (
            "VLLM_USE_MODELSCOPE",
            "0",
            "VLLM_USE_MODELSCOPE=0 has no effect: models come from the Hugging Face",
        ),
        (
            "VLLM_RBLN_DECODE_BATCH_BUCKET_STRATGY",
            "exp",
            "VLLM_RBLN_DECODE_BATCH_BUCKET_STRATGY is unknown and has no effect here; did you mean VLLM_RBLN_DEC",
        ),
        (
            "RBLN_SOMETHING_ELSE",
            "1",
            "RBLN_SOMETHING_ELSE is unknown and has no effect here; an NPU's runtime",
        ),
    ],
)
def test_what_is_ignored_is_reported_in_one_line(name: str, value: str, text: str) -> None:
    """With the reason, or with the name that was meant."""
    reported: list[table.Reading] = []
    check({name: value}, reported.append)
    (line,) = map(str, reported)
    assert line.startswith(text)
    assert "\n" not in line


def test_services_log_what_they_ignore() -> None:
    """One warning for each variable."""
    with capture_logs() as logs:
        check_for_service({"VLLM_PLUGINS": "rbln", "VLLM_USE_V1": "1", "VLLM_RBLN_USE_VLLM_MODEL": "1"})
    assert [(line["log_level"], line["variable"]) for line in logs] == [
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
    values: dict[str, set[str]] = {row.name: {""} for row in VARIABLES.values()}
    for name, default in vllm_defaults().items():
        values[name].add(default)
    for name in values:
        row = VARIABLES[name]
        if row.kind is Kind.MAPPED and is_switch(row.ours):
            values[name] |= {"0", "1", "true", "True", "FALSE", "false", " 1 "}
    values["VLLM_LOGGING_LEVEL"] |= {"WARN", "warn", "FATAL", "CRITICAL", "Info", "notset", "DEBUG", "ERROR"}
    for name in ("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "VLLM_XGRAMMAR_CACHE_MB", "VLLM_CPU_KVCACHE_SPACE"):
        values[name].add("0")
    values["VLLM_LOG_BATCHSIZE_INTERVAL"] |= {"0", "-1"}
    values["VLLM_RBLN_DECODE_BATCH_BUCKET_STRATEGY"] |= {"Exponential", "exp", "LINEAR"}
    values["VLLM_PP_LAYER_PARTITION"].add("")
    return values


def is_switch(flag: str) -> bool:
    """Returns whether a flag is a boolean setting."""
    return (
        LaunchSettings.model_fields[flag.removeprefix("--no-").strip("-").replace("-", "_")].annotation
        is bool
    )


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


def test_what_vllm_accepts_does_not_stop_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its own defaults nor its other spellings."""
    assert vllm_defaults().keys() >= {
        "VLLM_LOGGING_LEVEL",
        "VLLM_CPU_KVCACHE_SPACE",
        "VLLM_XGRAMMAR_CACHE_MB",
    }
    stopped = set()
    for name, values in values_that_start().items():
        for value in values:
            monkeypatch.setenv(name, value)
            try:
                check({name: value}, lambda _: None)
                if VARIABLES[name].kind in (Kind.MAPPED, Kind.HONOURED):
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
    """Only two values that mean something else are refused."""
    monkeypatch.setenv("RBLN_USE_CUSTOM_KERNEL", first)
    monkeypatch.setenv("VLLM_RBLN_USE_CUSTOM_KERNEL", second)
    if agree:
        assert load(LaunchSettings, []).rbln_use_custom_kernel is (first != "False")
        return
    with pytest.raises(ConfigurationRefused, match="set one setting, and differ"):
        load(LaunchSettings, [])
