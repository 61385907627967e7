"""`triptych serve` and `triptych up` take the flags of `vllm serve`."""

from pathlib import Path

import pytest

from deploy import cli
from deploy.commands.up import ServeSettings
from deploy.launcher.settings import LaunchSettings
from deploy.vllm_flags.translate import VllmFlags
from protos.errors import ConfigurationRefused
from protos.service.settings import load

_UNIT_FILE = (
    "Qwen/Qwen3-0.6B --host 0.0.0.0 --port 9000 --dtype bfloat16 --max-model-len 8K --max-num-seqs 64 -tp 2"
    " --gpu-memory-utilization 0.9 --enable-auto-tool-choice --tool-call-parser hermes --api-key a b"
    ' --disable-log-stats --enable-chunked-prefill --allowed-origins ["*"] -O3'
)


@pytest.mark.parametrize("cls", [LaunchSettings, ServeSettings])
def test_a_command_line_of_vllm_serve(cls: type[LaunchSettings]) -> None:
    """Each flag sets what it means, and what has no effect is said."""
    foreign = VllmFlags()
    settings = load(cls, _UNIT_FILE.split(), foreign)
    assert (settings.model, settings.host, settings.port) == ("Qwen/Qwen3-0.6B", "0.0.0.0", 9000)
    assert (settings.max_model_len, settings.max_num_seqs, settings.tensor_parallel_size) == (8192, 64, 2)
    assert (settings.kv_share, settings.tool_call_parser, settings.optimization_level) == (0.9, "hermes", 3)
    assert settings.allowed_origins == ("*",)
    assert [key.get_secret_value() for key in settings.api_key] == ["a", "b"]
    assert [note.split()[0] for note in foreign.notes] == [
        "--max-model-len", "--gpu-memory-utilization", "--enable-auto-tool-choice", "--disable-log-stats",
        "--enable-chunked-prefill",
    ]  # fmt: skip


def test_the_model_is_an_argument_or_a_flag() -> None:
    """It may stand before, behind and between the flags."""
    for line in ("m --port 1", "--port 1 m", "--workers 2 m --port 1", "--model m", "--port 1 -- m"):
        assert load(LaunchSettings, line.split(), VllmFlags()).model == "m"
    assert load(LaunchSettings, [], VllmFlags()).model == "smollm2"


def test_a_file_of_vllm_serve(tmp_path: Path) -> None:
    """Its flags are at the top level; ours may be in sections."""
    path = tmp_path / "vllm.yaml"
    path.write_text(
        "model: m\nport: 1\nmax-model-len: 8K\nserved-model-name: [one]\nenable-chunked-prefill: true\n"
        "compilation-config: {mode: VLLM_COMPILE, cudagraph_mode: FULL}\nworker: {cpu_threads: 3}\n"
        "no-such-thing: 1\n"
    )
    foreign = VllmFlags()
    with pytest.raises(Exception, match="there is no setting 'no_such_thing'"):
        load(LaunchSettings, ["--config", str(path)], foreign)
    path.write_text(path.read_text().replace("no-such-thing: 1\n", ""))
    settings = load(LaunchSettings, ["--config", str(path), "--port", "2"], foreign)
    assert (settings.model, settings.port, settings.max_model_len) == ("m", 2, 8192)
    assert (settings.level_for(0), settings.cpu_threads) == (3, 3)
    assert len(foreign.notes) == 3


def test_serve_listens_where_vllm_serve_does() -> None:
    """`up` stays on this machine unless told otherwise."""
    assert load(ServeSettings, []).host == "0.0.0.0"
    assert load(LaunchSettings, []).host == "127.0.0.1"


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        ("serve m --max-modle-len 5", "--max-modle-len; did you mean --max-model-len?"),
        ("serve m --enable-sleep", "--enable-sleep; did you mean --enable-sleep-mode?"),
        ("serve m --qqqqqqq", "--qqqqqqq; --help lists the flags"),
        ("serve m n", "unrecognized arguments: n; m is the model"),
        ("up m --model n", "the model is given twice: m and --model n"),
        ("compile m --tokenizer t", "--tokenizer is read from the model's folder"),
    ],
)
def test_refusals_are_one_line(line: str, refusal: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"triptych {line.split(maxsplit=1)[0]}: ")
    assert refusal in error


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no-enable-prefix-caching: true", {"enable_prefix_caching": False}),
        ("no_enforce_eager: true\nenforce-eager: true", {"backend": "eager"}),
        ("no-enforce-eager: true", {}),
        ("no-enable-prefix-caching: false\nno-enable-chunked-prefill: true", {}),
        ("enable-sleep-mode: false\nenable-lora:\nhf-overrides: {}", {}),
        (
            'lora-modules: [sql=/a, {"name": "b", "path": "/b"}]\nenable_lora: true',
            {"lora_modules": ("sql=/a", "b=/b"), "enable_lora": True},
        ),
        ('tensor-parallel-size: "2"\nmax-model-len: -1', {"tensor_parallel_size": 2}),
        ("disable-log-requests: true\nswap-space: 4\noptimization-level: 3", {"optimization_level": 3}),
        ("worker:\n  no-compile-cache: true", {"compile_cache": False}),
        ("worker:\n  no_compile_cach: true", "'no_compile_cach'; did you mean compile_cache"),
    ],
)
def test_files_have_the_styles_of_vllm(text: str, expected: dict[str, object] | str, tmp_path: Path) -> None:
    """Dashes or underscores, negated switches, quoted numbers, nested values, and older flags."""
    path = tmp_path / "vllm.yaml"
    path.write_text(f"model: m\n{text}\n")
    if isinstance(expected, str):
        with pytest.raises(ConfigurationRefused, match=expected):
            load(LaunchSettings, ["--config", str(path)], VllmFlags())
        return
    settings = load(LaunchSettings, ["--config", str(path)], VllmFlags())
    assert {name: getattr(settings, name) for name in settings.model_fields_set} == {"model": "m", **expected}
