"""`triptych up --secure`: everything works with the files that it makes, and nothing without them."""

import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import grpc
import httpx
import pytest

from deploy.secure_files import SERVICE_NAME, SecureFiles
from protos.service.grpc_options import unix_address
from protos.triptych.v1 import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.e2e.stack.test_up import QUICK, launcher, read_until
from tests.support.stack import listening_port

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(240)]

OPTIONS = [("grpc.ssl_target_name_override", SERVICE_NAME), ("grpc.enable_http_proxy", 0)]


def code_of(
    address: str, method: str, credentials: grpc.ChannelCredentials | None, token: str
) -> grpc.StatusCode:
    """Calls GetModel or Describe; returns the status."""
    channel = (
        grpc.insecure_channel(address, options=OPTIONS)
        if credentials is None
        else grpc.secure_channel(address, credentials, options=OPTIONS)
    )
    with channel:
        calls: dict[str, Callable[[Any], object]] = {
            "GetModel": lambda metadata: inference_pb2_grpc.InferenceStub(channel).GetModel(
                inference_pb2.GetModelRequest(), timeout=10, metadata=metadata
            ),
            "Describe": lambda metadata: worker_pb2_grpc.WorkerStub(channel).Describe(
                worker_pb2.DescribeRequest(), timeout=10, metadata=metadata
            ),
        }
        try:
            calls[method]((("authorization", f"Bearer {token}"),) if token else ())
        except grpc.RpcError as error:
            return cast("grpc.Call", error).code()
    return grpc.StatusCode.OK


def test_a_secure_stack_serves_those_with_its_files_alone(tmp_path: Path) -> None:
    """The printed command works as it is; each port refuses callers that lack a file; no log has a secret."""
    files = SecureFiles.in_folder(tmp_path / "secure")
    with launcher(tmp_path, *QUICK, "--secure", "--scheduler-port", "0") as process:
        printed = [read_until(process, "Serving smollm2"), read_until(process, "/chat/completions")]
        done = subprocess.run(["sh", "-c", printed[1]], capture_output=True, text=True, check=True)
        assert "Paris" in done.stdout, done.stdout
        url = f"https://127.0.0.1:{listening_port(tmp_path / 'gateway.log')}/v1/models"
        assert httpx.get(url, verify=ssl.create_default_context(cafile=files.ca)).status_code == 401
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            httpx.get(url)

        ca, token = files.ca.read_bytes(), files.service_token.read_text().strip()
        mutual = grpc.ssl_channel_credentials(
            ca, files.service_key.read_bytes(), files.service_cert.read_bytes()
        )
        direct = f"127.0.0.1:{listening_port(tmp_path / 'scheduler.log')}"
        refused = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED)
        assert code_of(direct, "GetModel", None, token) is refused[0]
        assert code_of(direct, "GetModel", grpc.ssl_channel_credentials(ca), token) is refused[0]
        calls = (
            (direct, "GetModel", mutual),
            (unix_address(tmp_path / "scheduler.sock"), "GetModel", None),
            (unix_address(tmp_path / "worker-0.sock"), "Describe", None),
        )
        for address, method, with_tls in calls:
            assert code_of(address, method, with_tls, "") is refused[1]
            assert code_of(address, method, with_tls, "x" * 43) is refused[1]
            assert code_of(address, method, with_tls, token) not in refused
        process.terminate()
        rest, errors = process.communicate(timeout=30)
    assert errors == ""
    written = "".join([*printed, rest, *(log.read_text() for log in tmp_path.glob("*.log"))])
    for secret in (token, files.api_key.read_text().strip(), "PRIVATE KEY"):
        assert secret not in written
