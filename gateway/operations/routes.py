"""Health, metrics, versions, settings, the tokenizer, and the caches to empty."""

import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Annotated, Any, Final, cast

from fastapi import Depends
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field, with_config
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from typing_extensions import TypedDict

from gateway import VERSION
from gateway.auth.middleware import check_admin
from gateway.generation.respond import context_of
from gateway.http.openapi import api_router, documented
from gateway.scheduler_client.served_model import ServedModel
from protos.errors import TriptychError, Unavailable, Unsupported
from protos.service.logs import get_logger
from protos.triptych.v1 import inference_pb2 as inference

router = api_router("Operations")

_PACKAGES: Final = (
    "fastapi",
    "grpcio",
    "httptools",
    "pydantic",
    "starlette",
    "tokenizers",
    "uvicorn",
    "uvloop",
)

# Where files lie in another process says nothing here.
_FILES: Final = frozenset({"vocab_file", "merges_file", "tokenizer_file", "name_or_path"})


def require_admin(request: Request) -> None:
    """Lets requests with admin rights pass, with ``--dev-mode`` all requests."""
    context = context_of(request)
    if not context.settings.dev_mode:
        check_admin(request, context.keys)


_FOR_OPERATORS: Final = (Depends(require_admin),)

# ---- metrics ----


@router.get(
    "/metrics",
    summary="Read metrics",
    response_class=PlainTextResponse,
    responses=documented(description="Prometheus' text format."),
)
async def metrics(request: Request) -> Response:
    """Returns metrics in Prometheus' text format: the gateway's, then the scheduler's if it answers.

    `triptych:gateway_scheduler_up` says whether the scheduler's metrics are included. Gateways that share
    a port answer with the sum over all of them; on its own `--metrics-port`, each answers for itself. With
    `--metrics-access admin` it needs a key with admin rights.
    """
    context = context_of(request)
    if context.settings.metrics_access == "admin":
        check_admin(request, context.keys)
    try:
        scheduler = await context.client.get_metrics()
    except TriptychError:
        scheduler = b""
    context.metrics.scheduler_answers(bool(scheduler))
    shared = context.shared_metrics
    settings, server = context.settings, request.scope["server"]
    on_own_port = settings.metrics_port is not None and server is not None and server[1] != settings.port
    if shared is None or on_own_port:
        own = context.metrics.text()
    else:
        own = await shared.text()
    return Response(own + scheduler, media_type=CONTENT_TYPE_LATEST)


# ---- versions and settings ----


class Version(TypedDict):
    """Triptych's version."""

    version: str


@router.get("/version", summary="Read the version")
async def version() -> Version:
    """Returns the version of Triptych."""
    return {"version": VERSION}


class ServedModelInfo(TypedDict):
    """The model that is served."""

    names: Annotated[list[str], Field(description="The names that requests can use.")]
    source: Annotated[str, Field(description="Its Hugging Face id or folder.")]
    architecture: str
    dtype: str
    max_model_len: Annotated[int, Field(description="The longest sequence, tokens.")]
    system_fingerprint: str


class ServerInfo(TypedDict):
    """Settings, versions and the model."""

    settings: Annotated[dict[str, Any], Field(description="The gateway's settings; secrets are masked.")]
    versions: Annotated[dict[str, str], Field(description="Of Triptych, Python and the packages.")]
    model: Annotated[ServedModelInfo | None, Field(description="The model; null while none is known.")]


@router.get("/server_info", summary="Read settings and versions", dependencies=_FOR_OPERATORS)
async def server_info(request: Request) -> ServerInfo:
    """Returns the gateway's settings without secrets, versions, and the served model.

    Needs a key with admin rights, or `--dev-mode`.
    """
    context = context_of(request)
    served = context.watcher.served() if context.watcher.model_name else None
    packages = {name: metadata.version(name) for name in _PACKAGES}
    return {
        "settings": context.settings.model_dump(mode="json"),
        "versions": {
            "triptych": VERSION,
            "python": platform.python_version(),
            "platform": platform.platform(),
            **packages,
        },
        "model": None if served is None else _model(served),
    }


def _model(served: ServedModel) -> ServedModelInfo:
    model = served.model
    return {
        "names": [model.served_name, *model.aliases],
        "source": model.source,
        "architecture": model.architecture,
        "dtype": model.dtype,
        "max_model_len": model.max_model_len,
        "system_fingerprint": served.fingerprint,
    }


@with_config(extra="allow")
class TokenizerInfo(TypedDict):
    """The model's tokenizer_config.json, special tokens as text, and further fields."""

    tokenizer_class: str | None
    chat_template: Annotated[str | None, Field(description="The template that is used.")]


@router.get("/tokenizer_info", summary="Read the tokenizer")
async def tokenizer_info(request: Request) -> TokenizerInfo:
    """Returns the configuration of the model's tokenizer, with the chat template.

    Needs `--enable-tokenizer-info-endpoint`, a key with admin rights, or `--dev-mode`.
    """
    context = context_of(request)
    if not context.settings.enable_tokenizer_info_endpoint:
        require_admin(request)
    text = context.watcher.served().text
    config = {name: _plain(value) for name, value in text.config.items() if name not in _FILES}
    template = text.chat_template
    info = {
        **config,
        "tokenizer_class": config.get("tokenizer_class"),
        "chat_template": None if template is None else template.source,
    }
    return cast("TokenizerInfo", info)


def _plain(value: Any) -> Any:
    """Returns ``value`` with special tokens as text, without their flags."""
    if isinstance(value, dict):
        return value["content"] if "content" in value else {key: _plain(one) for key, one in value.items()}
    return list(map(_plain, value)) if isinstance(value, list) else value


class Sleeps(TypedDict):
    """Whether replicas sleep."""

    is_sleeping: Annotated[bool, Field(description="Always false.")]


@router.get("/is_sleeping", summary="Ask whether replicas sleep", dependencies=_FOR_OPERATORS)
async def is_sleeping() -> Sleeps:
    """Answers no: replicas do not sleep. Tools for vLLM ask before they send requests.

    Needs a key with admin rights, or `--dev-mode`.
    """
    return {"is_sleeping": False}


class Pauses(TypedDict):
    """Whether generation is paused."""

    is_paused: Annotated[bool, Field(description="Always false.")]


@router.get("/is_paused", summary="Ask whether generation is paused", dependencies=_FOR_OPERATORS)
async def is_paused() -> Pauses:
    """Answers no: the scheduler does not pause.

    Needs a key with admin rights, or `--dev-mode`.
    """
    return {"is_paused": False}


# ---- caches ----


class CacheReset(TypedDict):
    """The outcome of a reset."""

    success: Annotated[bool, Field(description="Always true: failures have an error status.")]


@router.post("/reset_prefix_cache", summary="Empty the prefix cache", dependencies=_FOR_OPERATORS)
async def reset_prefix_cache(request: Request, reset_running_requests: str = "false") -> CacheReset:
    """Drops every cached prefix on all replicas. Running requests go on.

    Needs a key with admin rights, or `--dev-mode`. `reset_running_requests=true` is refused.
    """
    if reset_running_requests.lower() not in ("false", "0", "no", "off"):
        raise Unsupported(
            "running requests keep their blocks; omit reset_running_requests", param="reset_running_requests"
        )
    num_replicas = await context_of(request).client.reset_prefix_cache()
    get_logger().info("the prefix cache has been emptied", replicas=num_replicas)
    return {"success": True}


_NO_CACHE: Final = documented(description="There is no such cache. The body is empty.")


@router.post(
    "/reset_mm_cache",
    summary="Empty the cache of images",
    response_class=Response,
    responses=_NO_CACHE,
    dependencies=_FOR_OPERATORS,
)
@router.post(
    "/reset_encoder_cache",
    summary="Empty the encoder's cache",
    response_class=Response,
    responses=_NO_CACHE,
    dependencies=_FOR_OPERATORS,
)
async def reset_no_cache() -> Response:
    """Does nothing: models read text alone. Tools for vLLM call it between measurements.

    Needs a key with admin rights, or `--dev-mode`.
    """
    return Response(status_code=200)


_SERVES = documented(
    description="A replica is ready. The body is empty. With TLS, it is a JSON object with `certificate_days_left`,"
    " by the setting that names the file."
)


class ServerLoad(TypedDict):
    """How busy this gateway is."""

    server_load: Annotated[int, Field(description="HTTP requests under way.")]


@router.get("/health", summary="Check health", response_class=Response, responses=_SERVES)
@router.get("/ready", summary="Check readiness", response_class=Response, responses=_SERVES)
@router.get("/ping", summary="Check health, as SageMaker does", response_class=Response, responses=_SERVES)
@router.post("/ping", summary="Check health by POST", response_class=Response, responses=_SERVES)
async def health(request: Request) -> Response:
    """Answers 200 if a request sent now would run, otherwise 503 with the reason.

    The check asks the scheduler whether a replica is ready. With TLS, the body has the days that each
    certificate has left.
    """
    context = context_of(request)
    load = await context.client.get_load()
    if not any(replica.state == inference.REPLICA_STATE_READY for replica in load.replicas):
        details = [f"{replica.replica_id}: {replica.detail or 'not ready'}" for replica in load.replicas]
        raise Unavailable(f"no replica is ready ({'; '.join(details) or 'no worker has registered'})")
    context.watcher.served()
    if days_left := context.metrics.certificates.days_left():
        rounded = {flag: round(days, 1) for flag, days in days_left.items()}
        return JSONResponse({"certificate_days_left": rounded})
    return Response(status_code=200)


@router.get(
    "/live",
    summary="Check that the gateway lives",
    response_class=Response,
    responses=documented(description="The gateway answers. The body is empty."),
)
async def live() -> Response:
    """Answers 200 whatever the state of scheduler and workers, which a restart would not change."""
    return Response(status_code=200)


@router.get("/load", summary="Read the load")
async def load(request: Request) -> ServerLoad:
    """Returns the number of HTTP requests under way in this gateway, without this request."""
    return {"server_load": context_of(request).metrics.num_in_flight - 1}


_SLEEP: Final = "replicas do not sleep; stop a worker to free its memory"
_PAUSE: Final = "the scheduler does not pause; SIGTERM lets a worker finish its requests and end"
_WEIGHTS: Final = "weights are read at the start alone; start workers with the new model"
_PROFILE: Final = (
    "there is no profiler; /metrics has the times of steps, and --otlp-traces-endpoint writes spans"
)
_SCALE: Final = "replicas keep their size; start or stop workers with 'triptych worker'"
_FAULTS: Final = (
    "the scheduler resumes the requests of lost workers by itself; /health says whether one is ready"
)
_AUDIO: Final = "models read and write text alone"
_RENDER: Final = "/tokenize returns the tokens of a prompt, and /v1/completions takes token ids"
_COMPARE: Final = "ask /v1/completions for the logprobs of one token, or serve a reranker and use /score"

UNSERVED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("/sleep", "/wake_up", "/release_kv_cache_memory"), _SLEEP),
    **dict.fromkeys(("/pause", "/resume"), _PAUSE),
    "/abort_requests": "a client ends its request by closing the connection",
    **dict.fromkeys(
        (
            "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update",
            "/start_draft_weight_update", "/update_weights", "/finish_weight_update", "/update_weight_version",
            "/weight_info", "/weight_checker", "/get_world_size",
        ),
        _WEIGHTS,
    ),
    "/collective_rpc": "workers run no methods by name; /server_info and /metrics say what runs",
    **dict.fromkeys(("/start_profile", "/stop_profile"), _PROFILE),
    **dict.fromkeys(("/scale_elastic_ep", "/is_scaling_elastic_ep"), _SCALE),
    **dict.fromkeys(("/fault_tolerance/apply", "/fault_tolerance/status"), _FAULTS),
    "/kv_event_sources": "the scheduler streams KV events over gRPC, at its own address",
    **dict.fromkeys(("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/realtime"), _AUDIO),
    **dict.fromkeys(
        (
            "/v1/chat/completions/render", "/v1/chat/completions/derender", "/v1/completions/render",
            "/v1/completions/derender", "/v1/messages/render", "/v1/responses/render", "/inference/v1/generate",
        ),
        _RENDER,
    ),
    **dict.fromkeys(("/generative_scoring", "/v1/systemone"), _COMPARE),
    "/invocations": "send requests to the routes under /v1/",
    "/v1/chat/completions/batch": "send each conversation to /v1/chat/completions; they run together",
    "/v2/embed": "send texts to /v1/embeddings",
    "/cohere/v2/chat": "send conversations to /v1/chat/completions",
}  # fmt: skip
"""The reason for each path, with the advice."""
