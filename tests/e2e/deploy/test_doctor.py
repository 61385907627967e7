"""`triptych doctor` and `triptych up` give the same answer, each in processes of its own."""

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.launcher.stack_plan import claim
from tests.support import tiny_models
from tests.support.foreign import STRANGER
from tests.support.paths import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a tokenizer."""
    folder = tiny_models.write("llama", tmp_path_factory.mktemp("model"))
    tiny_models.write_tokenizer(folder)
    return folder


def triptych(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, in the environment of a clean shell."""
    stacks = ("VLLM_", "RBLN_", "TRIPTYCH_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(stacks)}
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TRIPTYCH_COMPILE_CACHE_ROOT": str(cwd / "code")}
    return subprocess.run(
        [sys.executable, "-m", "deploy.cli", *arguments], check=False, capture_output=True, text=True, cwd=cwd,
        timeout=150, env=clean | own | variables,
    )  # fmt: skip


def check_refusal(model: Path, folder: Path, flags: str, words: str, **variables: str) -> None:
    """Both refuse with exit code 2 and the same line; sizes of free memory may differ."""
    command = [str(model), *flags.split()]
    for flag in ("--port",):
        command += [] if flag in command else [flag, "0"]
    before = set(folder.iterdir())
    doctor = triptych("doctor", "up", *command, "--json", cwd=folder, **variables)
    assert {path.name for path in set(folder.iterdir()) - before} <= {"code"}
    report: dict[str, Any] = json.loads(doctor.stdout)
    up = triptych("up", *command, cwd=folder, **variables)
    line = up.stderr.splitlines()[-1]
    assert (up.returncode, doctor.returncode) == (2, 2), (line, report)
    assert words in line
    shown, expected = (re.sub(r"\d+(\.\d+)?", "N", text) for text in (report["error"], line))
    assert expected.endswith(shown)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--max-num-seq 4", "did you mean --max-num-seqs"),
        *(
            pytest.param(flags, words, marks=SLOW)
            for flags, words in (
                ("--service-token-file missing", "missing"),
                ("--lora-modules a=/none", "needs --enable-lora"),
                ("--decode-bucket-strategy manual --decode-buckets 1,3 --max-num-seqs 8", "must equal"),
                ("--require-precompiled --no-compile-cache", "omit one of them"),
                ("--ssl-certfile missing.pem --ssl-keyfile missing.pem", "missing.pem"),
                ("--run-dir /proc/none", "/proc/none"),
                ("--workers 2 --device rbln", "lists 1 NPUs"),
                ("--enable-lora --lora-modules a=/none", "adapter a"),
                ("--chat-template missing.jinja", "missing.jinja"),
                ("--api-key-file missing.yaml", "missing.yaml"),
                ("--device rbln -O 3", "vendor's packages"),
                ("--tensor-parallel-size 3", "divisible by tensor parallel size (3)."),
                ("--num-blocks 10000000", "--num-blocks"),
                ("--require-precompiled -O 2", "nothing is precompiled"),
                ("--pooling-task embed", "pool"),
                ("--revision main --load-format gguf", "GGUF"),
            )
        ),
    ],
)
def test_a_wrong_flag_gets_the_same_refusal(model: Path, tmp_path: Path, flags: str, words: str) -> None:
    """The exit code and the reason are equal, at every depth of a start."""
    check_refusal(model, tmp_path, flags, words, RBLN_DEVICES="0")


@SLOW
def test_a_wrong_variable_gets_the_same_refusal(model: Path, tmp_path: Path) -> None:
    check_refusal(model, tmp_path, "", "VLLM_RBLN_USE_VLLM_MODEL", VLLM_RBLN_USE_VLLM_MODEL="0")
    check_refusal(model, tmp_path, "", "TRIPTYCH_MAX_NUM_SEQS", TRIPTYCH_MAX_NUM_SEQS="many")


def test_a_busy_port_or_folder_gets_the_same_refusal(model: Path, tmp_path: Path) -> None:
    """The doctor sees the launcher that runs, and leaves its files alone."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check_refusal(model, tmp_path, f"--port {port}", f"port {port}")
    busy = tmp_path / "busy"
    with claim(busy):
        (busy / "worker-0.log").touch()
        check_refusal(model, tmp_path, f"--run-dir {busy}", "in use by another `triptych up`")
        assert (busy / "worker-0.log").exists()


def test_secrets_of_another_user_get_the_same_refusal(model: Path, tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    secure = tmp_path / "run" / "secure"
    secure.mkdir(parents=True)
    os.chown(secure, STRANGER, 0)
    check_refusal(model, tmp_path, "", f"{secure} belongs to uid {STRANGER}")


@SLOW
def test_a_full_disk_gets_the_same_refusal(model: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        check_refusal(model, tmp_path, "", "cannot write to the run dir")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("free_pages", [0, pytest.param(1, marks=SLOW)])
def test_a_small_disk_gets_the_same_refusal(model: Path, tmp_path: Path, free_pages: int) -> None:
    """A real disk without room for the lock, or for the services' token."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "none", str(disk)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        (disk / "ballast").write_bytes(bytes(64 * 1024 - free_pages * page))
        check_refusal(model, tmp_path, f"--run-dir {disk}", "No space left")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@SLOW
def test_a_model_that_must_be_fetched_is_no_yes(tmp_path: Path) -> None:
    """A start would fetch it and check it then; until then the doctor does not know."""
    doctor = triptych(
        "doctor", "up", "smollm2", "--num-blocks=10000000", "--port=0", "--json",
        cwd=tmp_path, TRIPTYCH_CACHE=str(tmp_path / "cache"),
    )  # fmt: skip
    report = json.loads(doctor.stdout)
    checks = {check["name"]: check["status"] for check in report["checks"]}
    assert (doctor.returncode, report["starts"], report["error"]) == (1, None, "")
    assert (checks["model"], checks["shapes and text"]) == ("note", "skipped")


def _cut(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-100])


@SLOW
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_cut, "is damaged"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda folder: (folder / "chat_template.jinja").write_text("{% if %}"), "template"),
    ],
    ids=["cut weights", "no config", "no tokenizer", "bad template"],
)
def test_a_damaged_model_gets_the_same_refusal(
    model: Path, tmp_path: Path, damage: Callable[[Path], Any], words: str
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    damage(copy)
    check_refusal(copy, tmp_path, "", words)


@SLOW
def test_a_model_that_serves_passes(model: Path, tmp_path: Path) -> None:
    """The doctor says yes, leaves nothing, and has a result of each service."""
    doctor = triptych("doctor", "up", str(model), "--port=0", "--json", cwd=tmp_path)
    report = json.loads(doctor.stdout)
    assert (doctor.returncode, report["error"]) == (0, ""), report
    assert {"launcher", "gateway", "scheduler", "worker", "shapes", "text"} <= {
        check["name"] for check in report["checks"] if check["status"] == "ok"
    }
    assert {path.name for path in tmp_path.iterdir()} == {"code"}


@SLOW
def test_a_run_dir_with_a_long_path_passes(model: Path, tmp_path: Path) -> None:
    """A start uses another folder for its sockets then, and so does the doctor."""
    flags = [str(model), "--port=0", "--json", "--device=cpu", "-O0", f"--run-dir={tmp_path / ('x' * 100)}"]
    doctor = triptych("doctor", "up", *flags, cwd=tmp_path)
    assert (doctor.returncode, json.loads(doctor.stdout)["error"]) == (0, ""), doctor.stdout


@SLOW
def test_a_flag_without_effect_is_a_note(model: Path, tmp_path: Path) -> None:
    """At levels without compiled code nothing can be required; the start says the same."""
    flags = [str(model), "--port=0", "--device=cpu", "-O1", "--require-precompiled", "--json"]
    doctor = triptych("doctor", "up", *flags, cwd=tmp_path)
    checks = {check["name"]: check for check in json.loads(doctor.stdout)["checks"]}
    assert (doctor.returncode, checks["shapes"]["status"]) == (0, "note"), checks
    assert "--require-precompiled has no effect" in checks["shapes"]["text"]


@SLOW
def test_a_secure_stack_keeps_its_files(model: Path, tmp_path: Path) -> None:
    """The doctor uses the certificates that are there, makes others only for itself, and changes nothing."""
    flags = [str(model), "--port=0", "--secure", "--json"]
    new = triptych("doctor", "up", *flags, cwd=tmp_path)
    assert new.returncode == 0, new.stdout
    assert {path.name for path in tmp_path.iterdir()} <= {"code"}
    secure = tmp_path / "run" / "secure"
    made = triptych("secure-files", str(secure), cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    (secure / "service.pem").write_text("damaged")
    (secure / "api-keys.json").write_text("{")
    before = {path.name: path.read_bytes() for path in secure.iterdir()}
    damaged = triptych("doctor", "up", *flags, cwd=tmp_path)
    assert damaged.returncode == 2
    assert "api-keys.json" in json.loads(damaged.stdout)["error"]
    assert {path.name: path.read_bytes() for path in secure.iterdir()} == before


@SLOW
def test_each_worker_is_checked_with_its_own_devices(model: Path, tmp_path: Path) -> None:
    """The second worker gets another NPU, in a process of its own."""
    device = ("--workers=2", "--device=rbln", "--rbln-backend=rbln-check")
    flags = [str(model), "--port=0", *device]
    doctor = triptych("doctor", "up", *flags, "--json", cwd=tmp_path)
    checks = {check["name"]: check["status"] for check in json.loads(doctor.stdout)["checks"]}
    assert (doctor.returncode, checks["worker-1"]) == (0, "ok"), doctor.stdout
