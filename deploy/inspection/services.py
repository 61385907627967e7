"""Asks the other services whether they answer. None of them must: services wait for one another."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.diagnosis.findings import Missing, Remark
from protos.security.links import LinkSecurity
from protos.security.token_check import METADATA_KEY
from protos.triptych.v1 import inference_pb2, inference_pb2_grpc

_TIMEOUT_S = 3.0
INFERENCE, REGISTRY = "triptych.v1.Inference", "triptych.v1.WorkerRegistry"


def scheduler(address: str, security: LinkSecurity, service: str, *, waits: str) -> str:
    """Asks a scheduler for the health of one of its services.

    Args:
        address: host:port or unix:PATH.
        security: of the connection.
        service: its full name.
        waits: what the asking service does until the scheduler answers.

    Raises:
        Missing: it refuses the service token.
        Remark: it does not answer, or does not serve.
    """
    try:
        with security.open_blocking_channel(address) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(  # type: ignore[attr-defined]
                health_pb2.HealthCheckRequest(service=service), timeout=_TIMEOUT_S, wait_for_ready=False
            )
            _check_token(channel, security)
    except grpc.RpcError as error:
        reason = " ".join((error.details() or error.code().name).split())
        raise Remark(f"no scheduler answers at {address} ({reason}); {waits}") from error
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        what = "takes registrations" if service == REGISTRY else "has a ready worker"
        return f"{address} answers, and {what}"
    lacks = "takes no registrations" if service == REGISTRY else "has no ready worker"
    raise Remark(f"{address} answers, but {lacks}; {waits}")


def _check_token(channel: grpc.Channel, security: LinkSecurity) -> None:
    """Makes a call that needs the service token; health checks do not.

    Raises:
        Missing: it is refused.
    """
    metadata = ((METADATA_KEY, security.tokens.authorization),) if security.tokens else None
    try:
        inference_pb2_grpc.InferenceStub(channel).GetLoad(
            inference_pb2.GetLoadRequest(), timeout=_TIMEOUT_S, metadata=metadata
        )
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            raise Missing(f"the scheduler refuses this service: {error.details()}") from error
