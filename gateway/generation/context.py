"""The common parts of all routes, kept in the application's state."""

from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request

from gateway.auth.key_store import KeyStore
from gateway.generation.chat_prompts import ChatEncoder
from gateway.generation.streaming import while_client_waits
from gateway.metrics import Metrics, SharedMetrics
from gateway.scheduler_client.client import InferenceClient
from gateway.scheduler_client.served_model import ServedModel, ServedModelWatcher
from gateway.settings import Settings
from gateway.text.tokenization import TextWorker
from protos.service.backpressure import UnreadLimits
from protos.triptych.v1.inference_pb2 import LoraInfo


@dataclass(frozen=True, slots=True)
class Context:
    """The parts of a gateway."""

    settings: Settings
    client: InferenceClient
    watcher: ServedModelWatcher
    metrics: Metrics
    unread: UnreadLimits
    """Bytes of answers not yet read by clients."""
    text_worker: TextWorker
    chat_encoder: ChatEncoder
    keys: KeyStore
    shared_metrics: SharedMetrics | None
    """With several gateways on a port."""
    new_id: Callable[[], str]
    """Makes ids of answers and requests."""
    clock: Callable[[], float]
    """Monotonic seconds."""
    wall_clock: Callable[[], float]
    """Seconds since the epoch."""


def context_of(request: Request) -> Context:
    """Returns the gateway of ``request``."""
    context: Context = request.app.state.context
    return context


async def served_model(request: Request, name: str | None) -> ServedModel:
    """Returns the served model; waits until a model is ready.

    Args:
        request: the HTTP request, its body read.
        name: the request's name of the model, if any.

    Raises:
        Unavailable: if too many requests wait, or none was ready in time.
        UnknownModel: if another model is served.
        ClientGone: if the client disconnected.
    """
    context = context_of(request)
    watcher = context.watcher
    if watcher.awaits_model:
        waiting = context.client.startup_queue.wait_for(watcher.found(), "no model is ready yet")
        await while_client_waits(request.receive, waiting)
    return watcher.served(name)


async def generating_model(request: Request, name: str | None) -> ServedModel:
    """Returns the served model for a request to generate; ``name`` may be a LoRA adapter's.

    The scheduler refuses unknown names.

    Raises:
        Unsupported: if the model does not generate.
        UnknownModel: if the name is no adapter's.
        TriptychError: as :func:`served_model`.
    """
    served = await served_model(request, None)
    if served.model.pool_tasks:
        served = context_of(request).watcher.served(name)
    served.check_generates()
    served.adapter_of(name)
    return served


async def find_lora(request: Request, name: str) -> LoraInfo:
    """Returns the LoRA adapter with that name.

    Raises:
        UnknownModel: if there is none.
        TriptychError: if the scheduler cannot be asked.
    """
    context = context_of(request)
    served = context.watcher.served()
    for lora in await context.client.list_loras():
        if lora.name == name:
            return lora
    raise served.unknown(name)


async def known_model(request: Request, name: str | None) -> ServedModel:
    """Returns the served model; ``name`` may be a LoRA adapter's, which shares its tokenizer.

    Raises:
        UnknownModel: if there is no such model or adapter.
        TriptychError: if no model is known yet, or the scheduler cannot be asked.
    """
    served = context_of(request).watcher.served()
    if name is not None and not served.has_name(name):
        await find_lora(request, name)
    return served
