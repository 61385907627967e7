"""The worker's settings: optimization levels, the compile cache, and variables of other stacks."""

import math
import re
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from protos.errors import ConfigurationRefused
from protos.service.settings import load
from worker_svc.settings import Settings


def settings(*flags: str) -> Settings:
    return load(Settings, ["--model", "m", *flags])


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        ((), 1),
        (("-O", "2"), 2),
        (("-O3",), 3),
        (("--optimization-level", "0"), 0),
        (("--compilation-config", '{"level": 2}'), 2),
        (("--compilation-config", '{"level": 2}', "-O", "2"), 2),
        (("--compilation-config", '{"candidate_compile_sizes": [1, 8]}'), 1),
        (("-O", '{"level": 3, "candidate_compile_sizes": [1, 8]}'), 3),
        (("-O", "{'level': 3, 'candidate_compile_sizes': (1, 8)}"), 3),
        (("--compilation-config", "3"), 3),
        (("--compilation-config", "{'level': 2}"), 2),
        (("--compilation-config.level", "2"), 2),
        (("--backend", "eager"), 0),
        (("--backend", "eager", "-O", "2"), 0),
    ],
)
def test_levels(flags: tuple[str, ...], level: int) -> None:
    assert settings(*flags).level_for(1) == level


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("-O", "4"), "--optimization-level"),
        (("-O", "fast"), "--optimization-level"),
        (("--backend", "magic"), "--backend"),
        (("-O", "1", "--compilation-config", '{"level": 2}'), "set one of them"),
        (("--host", "", "--socket", "w.sock", "--scheduler-address", "a:1"), "host:port does not reach"),
        (("--backend", "compiled", "-O", "0"), "contradict"),
        (("--sampling-on-device",), "needs --device rbln, not auto"),
        (("--sampling-on-device", "--device", "cpu"), "needs --device rbln, not cpu"),
        (
            (
                *("--sampling-on-device", "--device", "rbln", "--tensor-parallel-size", "2"),
                *("--master", "a:1", "--replica-id", "r"),
            ),
            "tensor-parallel-size 1",
        ),
        (("--sampling-on-device", "--device", "rbln", "-O", "0"), "compiled graphs"),
        (("--sampling-on-device", "--device", "rbln", "--no-rbln-use-device-tensor"), "logits on the NPU"),
        (("--require-precompiled", "--no-compile-cache", "-O", "1"), "omit one of them"),
        (("--require-precompiled", "--no-compile-cache", "-O", "2"), "omit one of them"),
        (("--compilation-config", '{"cudagraph_mode": "FULL"}'), "--compilation-config"),
        (("--compilation-config", "not json"), "should be a level or JSON, for example"),
        (
            ("--compilation-config", '{"lvl": 2}'),
            r"--compilation-config\.lvl \(TRIPTYCH_COMPILATION_CONFIG\) Extra",
        ),
        (("-O", '{"level": 9}'), r"--compilation-config\.level "),
        (("-O", '{"level": 1}', "--compilation-config", "1"), "both have a configuration"),
        (("--compilation-config", '{"candidate_compile_sizes": [0]}'), "--compilation-config"),
    ],
)
def test_contradictions_are_refused(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigurationRefused, match=message) as caught:
        settings(*flags)
    assert "\n" not in caught.value.message


def test_strict_mode_goes_with_a_start_without_warm_up() -> None:
    """vLLM-RBLN allows both: strict mode is then the compiler's alone."""
    both = settings("--compile-strict", "--no-enable-warm-up")
    assert (both.compile_strict, both.enable_warm_up) == (True, False)


def test_the_cache_has_a_folder_per_device() -> None:
    """--compile-cache-dir replaces the folder, and --no-compile-cache turns the cache off."""
    assert settings().cache_folder("cuda") == Path("~/.cache/triptych/compiled/cuda").expanduser()
    assert settings("--compile-cache-dir", "/x").cache_folder("cuda") == Path("/x")
    assert settings("--no-compile-cache").cache_folder("cuda") is None


@pytest.mark.parametrize(
    ("variable", "value", "field", "expected"),
    [
        ("VLLM_CACHE_ROOT", "/c", "compile_cache_root", Path("/c")),
        ("TORCH_SENDNN_CACHE_DIR", "/d", "compile_cache_dir", Path("/d")),
        ("TORCH_SENDNN_CACHE_ENABLE", "0", "compile_cache", False),
        ("VLLM_DISABLE_COMPILE_CACHE", "1", "compile_cache", False),
        ("VLLM_DISABLE_COMPILE_CACHE", "0", "compile_cache", True),
        ("VLLM_RBLN_COMPILE_STRICT_MODE", "True", "compile_strict", True),
        ("VLLM_RBLN_COMPILE_ONLY", "1", "compile_only", True),
        ("VLLM_RBLN_ENABLE_WARM_UP", "0", "enable_warm_up", False),
        ("VLLM_SPYRE_REQUIRE_PRECOMPILED_DECODERS", "1", "require_precompiled", True),
        ("VLLM_SPYRE_DYNAMO_BACKEND", "eager", "backend", "eager"),
        ("VLLM_SPYRE_DYNAMO_BACKEND", "inductor", "backend", "compiled"),
        ("VLLM_SPYRE_DYNAMO_BACKEND", "", "backend", "auto"),
        ("RBLN_USE_CUSTOM_KERNEL", "1", "rbln_use_custom_kernel", True),
        ("VLLM_RBLN_DISABLE_MM", "1", "language_model_only", True),
        ("VLLM_RBLN_DISABLE_MM", "0", "language_model_only", False),
    ],
)
def test_variables_of_other_stacks(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, field: str, expected: object
) -> None:
    monkeypatch.setenv(variable, value)
    assert getattr(settings(), field) == expected


@pytest.mark.parametrize("value", ["sendnn", "sendnn_decoder"])
@pytest.mark.parametrize("variable", ["VLLM_SPYRE_DYNAMO_BACKEND", "SENDNN_INFERENCE_DYNAMO_BACKEND"])
def test_a_compiler_for_spyre_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    """The message has the variable and the words that work."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationRefused) as caught:
        settings()
    assert {variable, value, "inductor"} <= {*re.findall(r"\w+", caught.value.message)}


def test_a_spyre_device_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationRefused, match=r"cpu, cuda or rbln: .*Spyre"):
        settings("--device", "spyre")


def test_vllms_cache_root_holds_a_folder_for_npus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is the one that vLLM-RBLN uses, and vLLM's variable turns the cache off."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/c")
    assert settings().cache_folder("rbln") == Path("/c/rbln")
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
    assert settings().cache_folder("rbln") is None


@pytest.mark.parametrize(
    ("flags", "limit_s", "first_s"),
    [
        ((), 600, 0),
        (("--hang-timeout-s", "50"), 50, 0),
        (("--no-enable-warm-up",), 3600, 3600),
        (("--no-enable-warm-up", "--hang-timeout-s", "4000"), 4000, 3600),
        (("--hang-timeout-s", "0"), 0, 0),
        (("--no-enable-warm-up", "--configure-hang-timeout-s", "0"), 0, math.inf),
    ],
)
def test_steps_that_make_graphs_have_time_for_it(
    flags: tuple[str, ...], limit_s: float, first_s: float
) -> None:
    """Without warm-up, a step may take as long as a configuration; 0 stands for any time."""
    assert settings(*flags).step_limit_s(400.0) == limit_s
    assert settings(*flags).first_step_timeout_s == first_s


def test_a_scheduler_that_does_not_say_its_step_timeout_has_the_default() -> None:
    """Its default is 120 s, and a step may take half as much again."""
    assert settings().step_limit_s(0.0) == 180


def test_variables_of_vllm_mean_what_they_mean_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty one is unset, and a refused level names the variable that has it."""
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "")
    assert settings("--pipeline-parallel-size=2", "--master=h:1", "--replica-id=r").layout.world_size == 2
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "LOUD")
    with pytest.raises(ConfigurationRefused, match=r"\(TRIPTYCH_LOG_LEVEL, VLLM_LOGGING_LEVEL\)"):
        settings()


@pytest.mark.parametrize(
    ("value", "flags", "cpu", "other"),
    [
        ("0", [], None, None),
        ("", [], None, None),
        ("4", [], 4, None),
        ("4", ["--kv-memory=2"], 2, 2),
        ("4", ["--kv-memory=0"], None, None),
    ],
)
def test_vllms_kv_space_is_for_cpus(
    monkeypatch: pytest.MonkeyPatch, value: str, flags: list[str], cpu: float | None, other: float | None
) -> None:
    """On other devices it has no effect, which one line says, and --kv-memory comes first everywhere."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", value)
    loaded = settings(*flags)
    with capture_logs() as logs:
        assert loaded.kv_memory_on("cpu") == cpu
        assert logs == []
        assert [loaded.kv_memory_on(device) for device in ("cuda", "rbln")] == [other, other]
    ignored = [line["variable"] for line in logs]
    assert ignored == (["VLLM_CPU_KVCACHE_SPACE"] * 2 if cpu == 4 else [])


def test_a_kv_space_that_is_no_number_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal names the variable; an NPU, a GPU and a worker with --kv-memory do not read it."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4GB")
    with pytest.raises(ConfigurationRefused, match="VLLM_CPU_KVCACHE_SPACE should be a number of GiB"):
        settings()
    for device in ("rbln", "cuda"):
        assert settings(f"--device={device}").kv_memory_on(device) is None
    monkeypatch.setenv("TRIPTYCH_KV_MEMORY", "0")
    assert settings("--device=cpu").kv_memory_on("cpu") is None
