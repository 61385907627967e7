"""The built wheel in empty environments: `triptych install` and `triptych compose-files` work from it."""

import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

from tests.support.paths import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PACKAGES = ("deploy", "gateway", "protos", "scheduler_svc", "worker_svc")


def run(*command: object, cwd: Path, code: int = 0) -> str:
    """Runs a command away from the checkout and returns its output and errors."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PIP_NO_COMPILE"] = "1"  # halves the time; most modules are never imported
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    output = done.stdout + done.stderr
    assert done.returncode == code, output[-4000:]
    return output


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout, built from a copy because setuptools writes beside the sources."""
    source = tmp_path_factory.mktemp("source")
    for name in (*PACKAGES, "triptych"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    folder = tmp_path_factory.mktemp("dist")
    run(
        sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source,
        cwd=folder,
    )  # fmt: skip
    (path,) = folder.glob("*.whl")
    return path


def environment(folder: Path, *arguments: object) -> Path:
    """Makes an empty environment, installs with pip, and returns the folder of its commands."""
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    binaries = folder / "venv" / "bin"
    run(binaries / "python", "-m", "pip", "install", "-q", *arguments, cwd=folder)
    return binaries


def test_the_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    """The wheel has modules, schemas, kernel sources, compose files, Dockerfiles and locks."""
    with ZipFile(wheel) as content:
        names = set(content.namelist())
    files = {
        f"triptych/{path.relative_to(ROOT)}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix not in {".pyc", ".so"}
    }
    assert files - names == set()
    assert {"compose.yaml", "images/gateway.Dockerfile", "locks/worker-cpu.txt"} <= {
        name.removeprefix("triptych/deploy/") for name in names
    }
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"triptych"}


@pytest.mark.slow
def test_an_environment_keeps_its_own_names(wheel: Path, tmp_path: Path) -> None:
    """Packages called like ours are the user's in the user's processes, and ours in those of `triptych`."""
    binaries = environment(tmp_path, "--no-deps", wheel)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    before = {path.name for path in site.iterdir()}
    assert {name for name in before if "triptych" not in name} <= {
        "_distutils_hack", "distutils-precedence.pth", "pip", "setuptools", "pkg_resources", "__pycache__",
        *(name for name in before if name.startswith(("pip-", "setuptools-"))),
    }  # fmt: skip
    for name in PACKAGES:
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("WHOSE = 'the user'\n")
    code = f"import triptych; print(triptych.register()); import {', '.join(PACKAGES)}; print(protos.WHOSE)"
    assert run(binaries / "python", "-c", code, cwd=tmp_path) == "None\nthe user\n"
    for command in ((binaries / "triptych",), (binaries / "python", "-m", "triptych")):
        assert "usage: triptych" in run(*command, "--help", cwd=tmp_path)
        assert '"triptych"' in run(*command, "env", "--json", cwd=tmp_path)
    # A child process with `-m`, as the launcher starts its services, and one that multiprocessing spawns.
    (tmp_path / "deploy.py").write_text("raise SystemExit('of the current folder')\n")
    child = tmp_path / "child.py"
    child.write_text(
        "import multiprocessing, os, subprocess, sys\n"
        "def spawned():\n"
        "    from deploy import cli\n"
        "    print(cli.__file__, flush=True)\n"
        "if __name__ == '__main__':\n"
        "    import triptych\n"
        "    triptych.add_packages()\n"
        "    process = multiprocessing.get_context('spawn').Process(target=spawned)\n"
        "    process.start(); process.join()\n"
        "    subprocess.run([sys.executable, '-P', '-m', 'deploy.cli', 'version'], check=True)\n"
    )
    spawned, version = run(binaries / "python", child, cwd=tmp_path).splitlines()
    assert Path(spawned) == site / "triptych" / "deploy" / "cli.py"
    assert version.startswith("triptych ")


@pytest.mark.slow
@pytest.mark.parametrize(("extra", "command"), [("gateway", "gateway"), ("scheduler", "scheduler")])
def test_an_extra_installs_a_service_without_torch(
    wheel: Path, tmp_path: Path, extra: str, command: str
) -> None:
    """`pip install 'triptych[gateway]'` resolves freely, and the service starts with the result."""
    binaries = environment(tmp_path, f"{wheel}[{extra}]")
    assert "usage: triptych" in run(binaries / "triptych", command, "--help", cwd=tmp_path)
    assert_no_torch(binaries, tmp_path)
    assert "triptych install worker" in run(
        binaries / "triptych", "worker", "--model", "smollm2", "--scheduler-address=", cwd=tmp_path, code=2
    )


def assert_no_torch(binaries: Path, folder: Path) -> None:
    # The gateway has numpy, for the encodings of embeddings.
    code = "from importlib.util import find_spec; print([n for n in ('torch', 'vllm') if find_spec(n)])"
    assert run(binaries / "python", "-c", code, cwd=folder) == "[]\n"


@pytest.mark.slow
def test_a_bare_wheel_installs_its_services_and_serves(wheel: Path, tmp_path: Path) -> None:
    """`triptych install` installs everything that `triptych up` needs to serve a model."""
    binaries = environment(tmp_path, "--no-deps", wheel)
    refused = run(binaries / "triptych", "up", cwd=tmp_path, code=2)
    assert refused.endswith("is not installed; run `triptych install gateway scheduler worker`\n")
    run(binaries / "triptych", "install", "gateway", "scheduler", cwd=tmp_path)
    assert_no_torch(binaries, tmp_path)
    for service in ("gateway", "scheduler"):
        assert "usage: triptych" in run(binaries / "triptych", service, "--help", cwd=tmp_path)
    run(binaries / "triptych", "install", "worker", cwd=tmp_path)
    command = (
        binaries / "triptych", "up", "--port", "0", "--max-num-seqs", "2",
        "--max-model-len", "256", "--device", "cpu",
    )  # fmt: skip
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as up:
        assert up.stdout is not None
        try:
            printed = []
            for line in up.stdout:
                printed.append(line)
                if line.startswith("Serving smollm2"):
                    address = next(word for word in line.split() if word.startswith("http"))
                    break
            else:
                raise AssertionError("".join(printed))
            with urllib.request.urlopen(f"{address}/models", timeout=10) as answer:
                assert b"smollm2" in answer.read()
        finally:
            up.send_signal(signal.SIGINT)
        assert up.wait(30) == 0


@pytest.mark.slow
def test_compose_files_are_written_with_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """The folder has what the image builds copy: Dockerfiles, locks and the installed package as a wheel."""
    binaries = environment(tmp_path, "--no-deps", wheel)
    out = tmp_path / "out"
    printed = run(binaries / "triptych", "compose-files", out, cwd=tmp_path)
    assert printed == f"docker compose -f {out}/deploy/compose.yaml up --build --wait\n"
    services = yaml.safe_load((out / "deploy" / "compose.yaml").read_text())["services"]
    for service in services.values():
        context = (out / "deploy" / service["build"]["context"]).resolve()
        assert context == out
        dockerfile = (context / service["build"]["dockerfile"]).read_text()
        for word in dockerfile.split():
            if word.startswith("deploy/locks/") and word.endswith(".txt"):
                assert (context / word).exists(), word
    (written,) = out.glob("*.whl")
    with ZipFile(wheel) as original, ZipFile(written) as copy:
        assert set(copy.namelist()) == set(original.namelist())
    assert "is not empty" in run(binaries / "triptych", "compose-files", out, cwd=tmp_path, code=1)
    pip = (binaries / "python", "-m", "pip", "-q")
    run(*pip, "uninstall", "-y", "triptych", cwd=tmp_path)
    run(*pip, "install", "--no-deps", written, cwd=tmp_path)
    assert "usage: triptych" in run(binaries / "triptych", "install", "--help", cwd=tmp_path)
