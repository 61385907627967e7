"""What runs here: settings and versions, and the model's tokenizer."""

import platform
from importlib import metadata
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request

from gateway.routes.context import context_of
from gateway.routes.openapi import documented
from gateway.routes.operations.answers import Pauses, ServerInfo, Sleeps, TokenizerInfo
from gateway.routes.operations.rights import check_operator
from gateway.scheduler_link.served_model import ServedModel
from gateway.version import VERSION, fingerprint

router = APIRouter(tags=["Operations"])

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


@router.get(
    "/server_info",
    summary="Read settings and versions",
    response_model=None,
    responses=documented(ServerInfo),
)
async def server_info(request: Request) -> dict[str, Any]:
    """Returns the gateway's settings without secrets, versions, and the served model.

    Needs a key with admin rights, or `--dev-mode`.
    """
    check_operator(request)
    context = context_of(request)
    served = context.watcher.served() if context.watcher.model_name else None
    return {
        "settings": context.settings.model_dump(mode="json"),
        "versions": _versions(),
        "model": None if served is None else _model(served),
    }


def _versions() -> dict[str, str]:
    packages = {name: metadata.version(name) for name in _PACKAGES}
    return {
        "triptych": VERSION,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **packages,
    }


def _model(served: ServedModel) -> dict[str, Any]:
    model = served.model
    return {
        "names": [model.served_name, *model.aliases],
        "source": model.source,
        "architecture": model.architecture,
        "dtype": model.dtype,
        "max_model_len": model.max_model_len,
        "system_fingerprint": fingerprint(model),
    }


@router.get(
    "/tokenizer_info", summary="Read the tokenizer", response_model=None, responses=documented(TokenizerInfo)
)
async def tokenizer_info(request: Request) -> dict[str, Any]:
    """Returns the configuration of the model's tokenizer, with the chat template.

    Needs `--enable-tokenizer-info-endpoint`, a key with admin rights, or `--dev-mode`.
    """
    context = context_of(request)
    check_operator(request, is_open=context.settings.enable_tokenizer_info_endpoint)
    text = context.watcher.served().text
    config: dict[str, Any] = {
        name: _plain(value) for name, value in text.config.items() if name not in _FILES
    }
    template = text.chat_template
    return {
        **config,
        "tokenizer_class": config.get("tokenizer_class"),
        "chat_template": None if template is None else template.source,
    }


@router.get(
    "/is_sleeping", summary="Ask whether replicas sleep", response_model=None, responses=documented(Sleeps)
)
async def is_sleeping(request: Request) -> dict[str, bool]:
    """Answers no: replicas do not sleep. Tools for vLLM ask before they send requests.

    Needs a key with admin rights, or `--dev-mode`.
    """
    check_operator(request)
    return {"is_sleeping": False}


@router.get(
    "/is_paused",
    summary="Ask whether generation is paused",
    response_model=None,
    responses=documented(Pauses),
)
async def is_paused(request: Request) -> dict[str, bool]:
    """Answers no: the scheduler does not pause.

    Needs a key with admin rights, or `--dev-mode`.
    """
    check_operator(request)
    return {"is_paused": False}


def _plain(value: Any) -> Any:
    """Returns ``value`` with special tokens as text, without their flags."""
    if isinstance(value, dict):
        return value["content"] if "content" in value else {key: _plain(one) for key, one in value.items()}
    return list(map(_plain, value)) if isinstance(value, list) else value
