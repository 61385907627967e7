"""`triptych run-batch --model` when its stack does not start."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from deploy.client.connection import ClientError, Connection
from deploy.client.local_stack import wait_until_served
from tests.support.gateway.serving import running_gateway
from tests.support.security.certificates import service_files

pytestmark = pytest.mark.contract


def test_a_stack_that_does_not_start_is_named(tmp_path: Path) -> None:
    """`triptych up` says what is wrong with the flags that it got, and the batch does not begin."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.touch()
    command = (
        *(sys.executable, "-m", "deploy.cli", "run-batch", "-i", str(source), "-o", str(output)),
        *("--model", str(tmp_path), "--max-num-seqs", "0"),
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    first, second = done.stderr.splitlines()
    assert first.startswith("triptych up: --max-num-seqs ")
    assert second == "triptych run-batch: the stack did not start, see above"
    assert not output.exists()


@pytest.fixture
def launcher() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that runs until the test ends."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("protection", ["key", "certificate"])
async def test_a_stack_that_protects_itself_is_refused(
    tmp_path: Path, launcher: "subprocess.Popen[bytes]", protection: str
) -> None:
    """The batch's own connection has neither a key nor a CA, so waiting would not end."""
    paths = service_files(tmp_path)
    certificate: dict[str, Any] = {"ssl_certfile": paths.cert, "ssl_keyfile": paths.key}
    settings = {"api_key": (SecretStr("word"),)} if protection == "key" else certificate
    async with running_gateway(9, wait=False, **settings) as gateway:
        connection = Connection(f"http://127.0.0.1:{gateway.port}")
        with pytest.raises(ClientError, match=f"omit its .*{protection}"):
            await asyncio.to_thread(wait_until_served, launcher, connection)
