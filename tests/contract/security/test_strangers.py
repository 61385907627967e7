"""What a process of this machine gets from a scheduler as `triptych up` starts it, without its token."""

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from deploy.launcher.settings import LaunchSettings, secured
from deploy.launcher.stack_plan import StackPlan
from protos.service.grpc_options import SCHEMA_REVISION, unix_address
from protos.service.settings import load
from protos.triptych.v1 import inference_pb2, inference_pb2_grpc, registry_pb2, registry_pb2_grpc
from tests.support.listening import tcp_ports
from tests.support.service import running_service

pytestmark = pytest.mark.contract

INFERENCE, REGISTRY = inference_pb2_grpc.InferenceStub, registry_pb2_grpc.WorkerRegistryStub
CALLS: list[Callable[[grpc.Channel], object]] = [
    lambda channel: next(
        INFERENCE(channel).Generate(inference_pb2.GenerateRequest(prompt_token_ids=[1]), timeout=10)
    ),
    lambda channel: INFERENCE(channel).ResetPrefixCache(inference_pb2.ResetPrefixCacheRequest(), timeout=10),
    lambda channel: INFERENCE(channel).LoadLora(
        inference_pb2.LoadLoraRequest(name="a", source="/b"), timeout=10
    ),
    lambda channel: next(INFERENCE(channel).WatchKvEvents(inference_pb2.WatchKvEventsRequest(), timeout=10)),
    lambda channel: next(
        REGISTRY(channel).Register(
            registry_pb2.RegisterRequest(schema_revision=SCHEMA_REVISION, worker_id="w", port=1), timeout=10
        )
    ),
]


@pytest.mark.parametrize("direct", [False, True])
def test_a_stranger_is_refused(tmp_path: Path, direct: bool) -> None:
    """It has no port unless a flag asks for one, and no call passes on the socket or there."""
    flags = ["--port=0", f"--run-dir={tmp_path}", "--api-key=k", *(["--scheduler-port=0"] if direct else [])]
    settings, files = secured(load(LaunchSettings, flags))
    plan = StackPlan.make(settings, tmp_path)
    with running_service("-m", "scheduler_svc", *plan.scheduler.command[5:]) as service:
        port = plan.ports.scheduler
        assert tcp_ports([service.process.pid]) == ({port} if direct else set())
        assert tmp_path.joinpath("scheduler.sock").is_socket()
        addresses = [unix_address(tmp_path / "scheduler.sock"), *([f"127.0.0.1:{port}"] if direct else [])]
        for address in addresses:
            with grpc.insecure_channel(address) as channel:
                for call in CALLS:
                    with pytest.raises(grpc.RpcError) as refused:
                        call(channel)
                    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
                    assert "has no service token" in (refused.value.details() or "")
                token = (("authorization", f"Bearer {files.service_token.read_text().strip()}"),)
                answer = INFERENCE(channel).GetLoad(
                    inference_pb2.GetLoadRequest(), metadata=token, timeout=10
                )
                assert not answer.replicas
