"""Chat requests with tools, models and settings to plan their answers, and a check of the grammars."""

import json
from pathlib import Path
from typing import Any

import xgrammar

from gateway.scheduler_client.served_model import ServedModel
from gateway.schemas.base import parse
from gateway.schemas.chat import ChatCompletionRequest
from gateway.settings import Settings
from gateway.text.tokenization import TextCodec
from protos.triptych.v1 import common_pb2 as pb

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


def byte_compiler() -> xgrammar.GrammarCompiler:
    """Returns a compiler over bytes: these tests do not depend on the vocabulary."""
    vocab = [bytes([byte]) for byte in range(256)]
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(vocab, stop_token_ids=[0]))


def accepts(compiler: xgrammar.GrammarCompiler, constraint: pb.StructuredOutput, text: str) -> bool:
    """Whether ``text`` is a complete output under ``constraint``."""
    matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(constraint.structural_tag))
    return bool(matcher.accept_string(text) and matcher.accept_token(0))
