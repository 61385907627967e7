"""Waits until gateways serve a model."""

import asyncio
import ssl
import urllib.error
from collections.abc import Sequence
from dataclasses import dataclass

import grpc.aio

from deploy.healthcheck import url_opener
from protos.service.channels import LinkSecurity
from protos.triptych.v1 import common_pb2, inference_pb2, inference_pb2_grpc

_POLL_S = 0.25
_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Served:
    """The model that a stack serves."""

    name: str
    """The name that requests use."""
    pool_tasks: tuple[str, ...] = ()
    """Its tasks if it is a pooling model, for example `embed`."""


async def wait_for_model(gateways: Sequence[str], scheduler: str, security: LinkSecurity) -> Served:
    """Returns the model once every gateway serves it.

    Args:
        gateways: their URLs.
        scheduler: the scheduler's address.
        security: how the connection to it is protected.
    """
    async with security.open_channel(scheduler) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        while True:
            await asyncio.gather(*map(_wait_until_healthy, gateways))
            try:
                return _served(await stub.GetModel(inference_pb2.GetModelRequest(), wait_for_ready=True))
            except grpc.aio.AioRpcError:  # a service died meanwhile
                await asyncio.sleep(_POLL_S)


def _served(model: common_pb2.ModelInfo) -> Served:
    tasks = (common_pb2.PoolTask.Name(task).removeprefix("POOL_TASK_").lower() for task in model.pool_tasks)
    return Served(model.served_name, tuple(tasks))


async def _wait_until_healthy(gateway: str) -> None:
    while True:
        if await asyncio.to_thread(is_healthy, gateway):
            return
        await asyncio.sleep(_POLL_S)


def is_healthy(gateway: str) -> bool:
    """Whether a gateway of this machine serves. Blocks for up to 2 s.

    A gateway with client certificates refuses the check's connection, which proves only a listening gateway.
    """
    try:
        with url_opener().open(f"{gateway}/health", timeout=_TIMEOUT_S):
            return True
    except ssl.SSLError as error:
        return "CERTIFICATE_REQUIRED" in str(error)
    except urllib.error.URLError as error:
        return "CERTIFICATE_REQUIRED" in str(error.reason)
    except OSError:
        return False
