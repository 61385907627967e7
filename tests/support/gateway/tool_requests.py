"""Chat requests with tools, models and settings to plan their answers, and a check of the grammars."""

import json
from pathlib import Path
from typing import Any

from gateway.scheduler_client.served_model import ServedModel
from gateway.schemas.base import parse
from gateway.schemas.chat import ChatCompletionRequest
from gateway.settings import Settings
from gateway.text.tokenization import TextCodec
from protos.triptych.v1 import common_pb2 as pb
from tests.support.worker import grammar_texts
from worker_svc.grammars.spec import spec_of

USER = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse(ChatCompletionRequest, json.dumps({"messages": USER, **fields}).encode())


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def served_with(folder: Path) -> ServedModel:
    return ServedModel(
        pb.ModelInfo(served_name="m", vocab_size=49152, max_model_len=512), TextCodec.load(folder)
    )


def settings(**fields: Any) -> Settings:
    return Settings.model_construct(
        **{**{name: field.default for name, field in Settings.model_fields.items()}, **fields}
    )


def accepts(constraint: pb.StructuredOutput, text: str) -> bool:
    """Whether ``text`` is a complete output under ``constraint``, compiled as the worker does."""
    return grammar_texts.accepts(spec_of(constraint))(text)
