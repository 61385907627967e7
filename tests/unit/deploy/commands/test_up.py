"""`triptych up` before it starts any service: bad settings, ports, and the example request."""

import os
from pathlib import Path

import pytest

from deploy import cli
from deploy.commands import up
from deploy.launcher.settings import LaunchSettings
from deploy.launcher.stack_plan import claim
from deploy.secure_files import SecureFiles
from protos.triptych.v1 import common_pb2


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--port", "99999"], "--port (TRIPTYCH_PORT)"),
        (["--workers", "0"], "--workers"),
        (["--device", "tpu"], "--device"),
        (["--max-model-len", "many"], "--max-model-len"),
        (["--modle", "x"], "unrecognized arguments: --modle; did you mean --model"),
        (["--log-format", "console"], "--log-format cannot be set here: "),
        (["--no-reuse-port"], "--no-reuse-port cannot be set here: "),
        (["--block-size", "100", "--max-num-batched-tokens", "64"], "block_size 100"),
        (["-O", "0", "--backend", "compiled"], "--backend compiled and -O 0"),
        (["--tool-call-parser", "own"], "--tool-call-parser"),
    ],
)
def test_a_bad_setting_is_one_clear_line(
    arguments: list[str], fragment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names the flag and the exit code is 2, even where only one service refuses the value."""
    assert cli.main(["up", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("triptych up: ")
    assert fragment in lines[0]


def test_what_has_no_effect_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables of other stacks, a misspelled variable of ours, and one that the launcher sets itself."""
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)  # a worker that ran in this process has set some
    monkeypatch.setenv("VLLM_PLUGINS", "rbln")
    monkeypatch.setenv("TRIPTYCH_MAX_NUM_SEQ", "4")
    monkeypatch.setenv("TRIPTYCH_LOG_FORMAT", "console")
    with claim(tmp_path):  # so that nothing starts
        assert up.main(["--model", str(tmp_path), "--run-dir", str(tmp_path)]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "TRIPTYCH_MAX_NUM_SEQ is unknown and has no effect here; did you mean TRIPTYCH_MAX_NUM_SEQS?",
        "VLLM_PLUGINS=rbln has no effect here",
    ]
    assert lines[2].startswith("TRIPTYCH_LOG_FORMAT has no effect here: the launcher reads")


def test_the_example_request_fits_the_model() -> None:
    for tasks, path in (
        (["EMBED"], "/v1/embeddings"), (["CLASSIFY", "SCORE"], "/score"), (["CLASSIFY"], "/pooling"), (["TOKEN_EMBED"], "/pooling"),
    ):  # fmt: skip
        pool_tasks = [common_pb2.PoolTask.Value(f"POOL_TASK_{task}") for task in tasks]
        assert up.first_request(common_pb2.ModelInfo(pool_tasks=pool_tasks))[0] == path
    path, body = up.first_request(common_pb2.ModelInfo(served_name="m"))
    assert (path, body["model"]) == ("/v1/chat/completions", "m")


def test_the_example_request_sends_a_key_where_it_needs_one(tmp_path: Path) -> None:
    files = SecureFiles.in_folder(tmp_path)
    made = {"ssl_certfile": files.http_cert, "api_key_file": files.api_keys}
    plain = LaunchSettings(api_key=())
    assert up.credentials(plain, files) == ""
    with_key = LaunchSettings.model_validate({"api_key": ("hush",)})
    assert up.credentials(with_key, files) == '-H "Authorization: Bearer $KEY" '
    secure = plain.model_copy(update=made)
    assert up.credentials(secure, files) == (
        f'--cacert {files.ca} -H "Authorization: Bearer $(cat {files.api_key})" '
    )
