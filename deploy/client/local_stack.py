"""A stack that serves one batch: `triptych up` on a Unix socket of its own."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import httpx

from deploy.client.connection import ClientError, Connection
from deploy.launcher.parent import PARENT_VARIABLE

_POLL_S: Final = 0.1
_OK: Final = 200
_NOT_READY: Final = 503
# Only this user reaches the socket, so it needs no keys and no TLS.
_PROTECTION: Final = ("VLLM_API_KEY", "TRIPTYCH_API_KEY", "TRIPTYCH_SECURE", "TRIPTYCH_SSL_")


@contextlib.contextmanager
def local_stack(model: str, flags: Sequence[str]) -> Iterator[Connection]:
    """Serves a model until the block ends.

    Args:
        model: as `triptych up` takes it.
        flags: further flags of `triptych up`.

    Raises:
        ClientError: the stack does not start; its own output says why.
    """
    folder = tempfile.mkdtemp(prefix="triptych-batch-")
    connection = Connection("http://localhost", uds=Path(folder) / "http.sock")
    command = (
        *(sys.executable, "-m", "deploy.cli", "up", model),
        *("--uds", str(connection.uds), "--scheduler-port", "0", *flags),
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_PROTECTION)}
    environment[PARENT_VARIABLE] = str(os.getpid())
    # Its own session: Ctrl-C reaches this command, which then stops the stack. Its messages are no output.
    launcher = subprocess.Popen(command, env=environment, stdout=sys.stderr, start_new_session=True)
    try:
        wait_until_served(launcher, connection)
        yield connection
    finally:
        launcher.send_signal(signal.SIGINT)
        launcher.wait()
        shutil.rmtree(folder, ignore_errors=True)


def wait_until_served(launcher: "subprocess.Popen[bytes]", connection: Connection) -> None:
    """Waits until a stack serves.

    Args:
        launcher: the stack's.
        connection: to its gateway.

    Raises:
        ClientError: the launcher ends, or the gateway wants a key or TLS.
    """
    with connection.client() as client:
        while launcher.poll() is None:
            try:
                status = client.get("/v1/models").status_code
            except httpx.ConnectError:
                status = _NOT_READY
            except httpx.HTTPError as error:
                raise ClientError(
                    f"the stack does not speak plain HTTP ({error}); omit its certificate"
                ) from error
            if status == _OK:
                return
            if status != _NOT_READY:
                raise ClientError(f"the stack answered {status}; omit its API keys")
            time.sleep(_POLL_S)
    raise ClientError("the stack did not start, see above")
