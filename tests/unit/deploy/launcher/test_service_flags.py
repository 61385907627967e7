"""The flags that the launcher passes to each service."""

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from deploy.launcher import service_flags
from deploy.launcher.settings import LaunchSettings
from gateway.settings import Settings as GatewaySettings
from protos.errors import ConfigurationRefused
from protos.service.settings import ServiceSettings, is_secret, load
from scheduler_svc.adapters.registry import name_and_path
from scheduler_svc.settings import Settings as SchedulerSettings
from worker_svc.devices.registry import RBLN_PACKAGES
from worker_svc.settings import Settings as WorkerSettings

SCHEDULER = Path("/run/s.sock")


def gateway(*arguments: str) -> list[str]:
    return service_flags.gateway_flags(load(LaunchSettings, list(arguments)), 8123, None, SCHEDULER)


def scheduler(*arguments: str) -> list[str]:
    return service_flags.scheduler_flags(load(LaunchSettings, list(arguments)), 9, SCHEDULER)


def worker(*arguments: str) -> list[str]:
    return service_flags.worker_flags(
        load(LaunchSettings, list(arguments)), Path("/run/w.sock"), SCHEDULER, master=9
    )


SERVICES = ((GatewaySettings, gateway), (SchedulerSettings, scheduler), (WorkerSettings, worker))


def test_each_service_gets_its_own_settings() -> None:
    """The model goes to the worker, the shapes to the scheduler, the HTTP address to the gateway."""
    arguments = (
        "--model", "m", "--served-model-name", "pet", "--host", "0.0.0.0", "--max-num-seqs", "4",
        "--no-enable-prefix-caching", "--trust-remote-code", "--tool-call-parser", "hermes",
    )  # fmt: skip
    assert set(gateway(*arguments)) == {
        "--host=0.0.0.0", "--port=8123", "--scheduler-address=unix:/run/s.sock",
        "--log-format=json", "--tool-call-parser=hermes",
    }  # fmt: skip
    assert set(scheduler(*arguments)) == {
        "--host=127.0.0.1", "--port=9", "--socket=/run/s.sock", "--log-format=json", "--served-model-name=pet", "--expect-model=m",
        "--max-num-seqs=4", "--no-enable-prefix-caching",
    }  # fmt: skip
    assert set(worker(*arguments)) == {
        "--model=m", "--host=", "--socket=/run/w.sock", "--scheduler-address=unix:/run/s.sock", "--log-format=json",
        "--trust-remote-code",
    }  # fmt: skip


# Settings of TLS go together.
_TLS = ["--grpc-tls-ca=/ca.pem", "--grpc-tls-cert=/cert.pem", "--grpc-tls-key=/key.pem"]

# Arguments for fields that need more than their type to choose a valid value.
ARGUMENTS = {
    **dict.fromkeys(("grpc_tls_ca", "grpc_tls_cert", "grpc_tls_key"), _TLS),
    "grpc_tls_name": [*_TLS, "--grpc-tls-name=triptych"],
    "grpc_tls_require_client_cert": [*_TLS, "--grpc-tls-require-client-cert"],
    "ssl_keyfile": ["--ssl-keyfile=/key.pem", "--ssl-certfile=/cert.pem"],
    "ssl_ca_certs": ["--ssl-ca-certs=/ca.pem", "--ssl-certfile=/cert.pem"],
    "ssl_cert_reqs": ["--ssl-cert-reqs=2", "--ssl-certfile=/cert.pem", "--ssl-ca-certs=/ca.pem"],
    "allowed_origins": ["--allowed-origins", "https://a.example", "https://b.example"],
    "allowed_methods": ["--allowed-methods", "GET", "POST"],
    "chat_template": ["--chat-template={{ messages }}"],
    "default_chat_template_kwargs": ['--default-chat-template-kwargs={"enable_thinking": false}'],
    "reasoning_effort_budgets": ['--reasoning-effort-budgets={"low": 1024}'],
    "otlp_traces_endpoint": ["--otlp-traces-endpoint=http://127.0.0.1:4317"],
    "max_logprobs": ["--max-logprobs=5"],
    "max_total_body_bytes": ["--max-total-body-bytes=33554432"],
    "root_path": ["--root-path=/llm"],
    "compilation_config": ['--compilation-config={"level": 3, "candidate_compile_sizes": [1, 8]}'],
    "compile_strict": ["--compile-strict"],
    "generation_config": ["--generation-config=vllm"],
    "override_generation_config": ['--override-generation-config={"top_k": 5, "temperature": 0.5}'],
    "sampling_on_device": ["--sampling-on-device", "--device=rbln"],
    "enable_expert_parallel": ["--enable-expert-parallel", "--tensor-parallel-size=2"],
    "decode_bucket_strategy": ["--decode-bucket-strategy=linear"],
    "decode_buckets": ["--decode-buckets=1,3", "--decode-bucket-strategy=manual"],
    "pool_batch_sizes": ["--pool-batch-sizes=1,4", "--pool-prompt-lens=4096,1024"],
    "pool_prompt_lens": ["--pool-batch-sizes=2", "--pool-prompt-lens=512"],
    "reasoning_parser": ["--reasoning-parser=vllm:kimi_k2"],
    "tenant_weights": ["--tenant-weights=paid=4,trial=0.5"],
    "tool_call_parser": ["--tool-call-parser=hermes"],
    "batchsize_log_interval_s": ["--batchsize-log-interval-s=-1"],
    "lora_modules": ["--enable-lora", "--lora-modules", "sql=/adapters/sql", "chat=/adapters/chat"],
    "max_cpu_loras": ["--max-cpu-loras=9"],
}
PASSED_ON = [
    pytest.param(service, flags, name, id=f"{service.__module__.partition('.')[0]}-{name}")
    for service, flags in SERVICES
    for name in service.model_fields
    if name not in {"host", "port", "metrics_port", *LaunchSettings.fixed} and not is_secret(service, name)
]


@pytest.mark.parametrize(("service", "flags", "name"), PASSED_ON)
def test_a_service_reads_the_value_that_up_was_given(
    service: type[ServiceSettings], flags: Any, name: str
) -> None:
    arguments = ARGUMENTS.get(name) or [sample(service, name)]
    given = load(LaunchSettings, arguments)
    value = getattr(given, name)
    assert value != service.model_fields[name].get_default(call_default_factory=True)
    assert getattr(load(service, flags(*arguments)), name) == value


@pytest.mark.parametrize(
    ("given", "modules"),
    [
        (['{"name": "a", "path": "/x y"}'], [("a", "/x y")]),
        (['{"name": "a", "path": "/x,y"}', "b=/z"], [("a", "/x,y"), ("b", "/z")]),
        (['{"name": "a=b", "path": "/x=y"}', '{"name": "{", "path": "é"}'], [("a=b", "/x=y"), ("{", "é")]),
        (['{"name": "a", "path": "/x"} {"name": "b", "path": "/y z"}'], [("a", "/x"), ("b", "/y z")]),
    ],
)
def test_adapters_keep_their_names_and_paths(given: list[str], modules: list[tuple[str, str]]) -> None:
    """Also those with spaces, commas and equals signs, which JSON can say."""
    flags = scheduler("--enable-lora", "--lora-modules", *given)
    read = load(SchedulerSettings, flags).lora_modules
    assert [name_and_path(module) for module in read] == modules


def test_secrets_travel_as_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other users of the machine see flags: no key is in any of them. The gateway reads the same keys."""
    given = ["--admin-api-key", "hush", "--api-key", "hush-1,", '["hush']
    settings = load(LaunchSettings, given)
    variables = service_flags.secrets_of(settings, GatewaySettings)
    assert {"TRIPTYCH_ADMIN_API_KEY", "TRIPTYCH_API_KEY"} == {
        name for name, value in variables.items() if value
    }
    # A worker, which may run a model's own code, does not even inherit those of the launcher.
    workers = service_flags.secrets_of(settings, WorkerSettings)
    assert workers.keys() >= {"TRIPTYCH_ADMIN_API_KEY", "TRIPTYCH_API_KEY", "VLLM_API_KEY"}
    assert not any(workers.values())
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    read = load(GatewaySettings, gateway(*given))
    assert (read.api_key, read.admin_api_key) == (settings.api_key, settings.admin_api_key)
    assert "hush" not in " ".join(gateway(*given)) + repr(settings)


def sample(service: type[ServiceSettings], name: str) -> str:
    """A flag with a valid value that is not the default."""
    field = service.model_fields[name]
    flag = f"--{name.replace('_', '-')}"
    kind = next((part for part in get_args(field.annotation) if part is not type(None)), field.annotation)
    if get_origin(field.annotation) is Literal:
        kind = Literal
    if kind is bool:
        return flag.replace("--", "--no-", 1) if field.default else flag
    if kind is Literal:
        return f"{flag}={next(choice for choice in get_args(field.annotation) if choice != field.default)}"
    if kind in {int, float}:
        bounds = {type(item).__name__: item for item in field.metadata}
        low = getattr(bounds.get("Ge"), "ge", None) or getattr(bounds.get("Gt"), "gt", None) or 0
        high = getattr(bounds.get("Le"), "le", None)
        values = [low + 1, high, (low + (high or 9)) / 2]
        value = next(
            item
            for item in values
            if item is not None and item != field.default and (not high or item <= high)
        )
        return f"{flag}={value}"
    return f"{flag}=some-value"


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several workers split the cores unless --cpu-threads is set; a single one takes its default."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert "--cpu-threads=2" in worker("--workers", "3")
    assert "--cpu-threads=5" in worker("--workers", "3", "--cpu-threads", "5")
    assert not any(flag.startswith("--cpu-threads") for flag in worker())


def test_each_worker_gets_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    cuda = load(LaunchSettings, ["--device", "cuda", "--workers", "3"])
    assert [service_flags.worker_environment(cuda, index) for index in range(3)] == [
        {"CUDA_VISIBLE_DEVICES": name} for name in ("4", "5", "4")
    ]
    assert service_flags.worker_environment(load(LaunchSettings, ["--device", "cuda"]), 0) == {}


def npus(*flags: str) -> list[dict[str, str]]:
    settings = load(LaunchSettings, ["--device", "rbln", *flags])
    count = settings.workers * settings.layout.world_size
    return [service_flags.worker_environment(settings, index) for index in range(count)]


TWO_EACH = ("--rbln-num-devices-per-local-rank", "2")


@pytest.fixture
def all_npus(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that lists no NPUs."""
    for name in ("RBLN_DEVICES", "RBLN_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("all_npus")
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), [None]),
        (TWO_EACH, [None]),
        (("--workers", "3"), ["0", "1", "2"]),
        (("--workers", "2", *TWO_EACH), ["0,1", "2,3"]),
        (("--tensor-parallel-size", "2", *TWO_EACH), ["0,1", "2,3"]),
        (("--workers", "2", "--pipeline-parallel-size", "2", *TWO_EACH), ["0,1", "2,3", "4,5", "6,7"]),
        (("--workers", "2", "--rbln-backend", "rbln-check"), [None, None]),
    ],
)
def test_each_worker_gets_npus_of_its_own(flags: tuple[str, ...], expected: list[str | None]) -> None:
    """A process has as many as work together; a single one takes what the vendor's runtime gives it."""
    assert npus(*flags) == [{} if names is None else {"RBLN_DEVICES": names} for names in expected]


@pytest.mark.usefixtures("all_npus")
@pytest.mark.parametrize("variable", ["RBLN_DEVICES", "RBLN_VISIBLE_DEVICES"])
def test_listed_npus_are_divided(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of the vendor's names count; surplus NPUs stay unused, and a list that is too short is refused."""
    monkeypatch.setenv(variable, "4, 6,5,7,9")
    assert npus("--workers", "2", *TWO_EACH) == [{"RBLN_DEVICES": "4,6"}, {"RBLN_DEVICES": "5,7"}]
    assert npus(*TWO_EACH) == [{}]
    reason = f"{variable}=4,6,5,7,9 lists 5 NPUs, but 6 are needed, 2 for each worker process; "
    with pytest.raises(ConfigurationRefused, match=reason):
        npus("--workers", "3", *TWO_EACH)
    with pytest.raises(ConfigurationRefused, match="8 are needed, 8 for each worker process"):
        npus("--rbln-num-devices-per-local-rank", "8")


@pytest.mark.usefixtures("all_npus")
def test_workers_of_device_auto_get_npus_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vendor's packages may find NPUs, which processes cannot share; else no variable matters."""
    settings = load(LaunchSettings, ["--device", "auto", "--workers", "2"])
    monkeypatch.setenv("RBLN_DEVICES", "4")
    assert [service_flags.worker_environment(settings, index) for index in range(2)] == [{}, {}]
    for package in RBLN_PACKAGES:
        (tmp_path / package).mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationRefused, match="lists 1 NPUs"):
        service_flags.worker_environment(settings, 0)
    monkeypatch.delenv("RBLN_DEVICES")
    environments = [service_flags.worker_environment(settings, index) for index in range(2)]
    assert environments == [{"RBLN_DEVICES": "0"}, {"RBLN_DEVICES": "1"}]


@pytest.mark.usefixtures("all_npus")
def test_the_older_name_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RBLN_DEVICES", "1,0")
    monkeypatch.setenv("RBLN_VISIBLE_DEVICES", "2,3")
    assert npus("--workers", "2") == [{"RBLN_DEVICES": "1"}, {"RBLN_DEVICES": "0"}]
