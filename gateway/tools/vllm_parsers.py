"""Parsers of thinking of an installed vLLM, by name: ``--reasoning-parser vllm:NAME``.

This is the only place outside the worker that imports vLLM, and only if a setting asks for it: other gateways
stay free of vLLM and torch. vLLM's parsers also need token ids; they get those of each piece of text, which
contain the same markers.
"""

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.parsers.events import Event, Reasoning, Text
from gateway.parsers.reasoning import Thinking, ThinkingFormat
from gateway.settings import VLLM_PREFIX
from gateway.text.tokenization import TextCodec
from protos.errors import ConfigurationRefused


def check(setting: str, value: str) -> None:
    """Checks that vLLM provides the parser of ``value``, if it names a parser of vLLM's.

    Importing vLLM takes seconds and loads torch.

    Raises:
        ConfigurationRefused: if vLLM is not installed or lacks the parser.
    """
    if not value.startswith(VLLM_PREFIX):
        return
    name = value.removeprefix(VLLM_PREFIX)
    if importlib.util.find_spec("vllm") is None:
        raise ConfigurationRefused(
            f"{setting} {value}: vLLM is not installed in the gateway's environment; install it there or"
            " choose one of the gateway's own parsers"
        )
    manager = _manager()
    known = manager.list_registered()
    if name not in known:
        raise ConfigurationRefused(
            f"{setting} {value}: vLLM has no such parser; choose one of {', '.join(known)}"
        )
    try:
        _class(manager, value)
    except ImportError as error:
        raise ConfigurationRefused(
            f"{setting} {value}: vLLM cannot load that parser: {error}; install the missing package beside"
            " vLLM"
        ) from error


def _class(manager: Any, value: str) -> Any:
    name = value.removeprefix(VLLM_PREFIX)
    return manager.get_reasoning_parser(name)


def _manager() -> Any:
    return importlib.import_module("vllm.reasoning").ReasoningParserManager


def uses_vllm(*settings: str) -> bool:
    """Whether any of these settings names a parser of vLLM."""
    return any(value.startswith(VLLM_PREFIX) for value in settings)


def prepare(text: TextCodec) -> None:
    """Does slow work before a request needs it: imports (seconds), wrapping the tokenizer (0.1 s or more)."""
    _tokenizer(text)
    _request(())


def _tokenizer(text: TextCodec) -> Any:
    """Returns the tokenizer as vLLM's parsers expect it: wrapped by transformers, with a cached vocabulary.

    The wrapper is a copy of the tokenizer, made once per model and shared by all parsers.
    """

    def wrap() -> Any:
        transformers = importlib.import_module("transformers")
        wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=text.tokenizer, **text.special_tokens)
        return importlib.import_module("vllm.tokenizers.hf").get_cached_tokenizer(wrapped)

    return text.wrapped(wrap)


def _request(tools: Sequence[Mapping[str, Any]]) -> Any:
    protocol = importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol")
    return protocol.ChatCompletionRequest(
        messages=[{"role": "user", "content": ""}], tools=list(tools) or None
    )


class _History:
    """The arguments of vLLM's streaming interface: text and token ids before, with and of each piece."""

    def __init__(self, text: TextCodec) -> None:
        self._codec = text
        self._text = ""
        self._ids: list[int] = []

    def push(self, piece: str) -> tuple[str, str, str, list[int], list[int], list[int]]:
        """Returns the arguments for the next piece."""
        ids = self._codec.encode(piece, add_special_tokens=False)
        before, ids_before = self._text, self._ids
        self._text, self._ids = before + piece, ids_before + ids
        return before, self._text, piece, ids_before, self._ids, ids


class ReasoningParser:
    """Adapts a reasoning parser of vLLM to :class:`gateway.parsers.events.ToolParser`."""

    def __init__(self, parser: Any, request: Any, text: TextCodec, prompt: Sequence[int]) -> None:
        self._parser = parser
        self._request = request
        self._history = _History(text)
        self._over = bool(parser.is_reasoning_end(list(prompt)))
        if not self._over and hasattr(parser, "adjust_initial_state_from_prompt"):
            parser.adjust_initial_state_from_prompt(list(prompt))

    @property
    def marks(self) -> ThinkingFormat | None:
        """Its markers; ``None`` if it does not say."""
        start, end = self._parser.reasoning_start_str, self._parser.reasoning_end_str
        return ThinkingFormat(start, end) if start and end else None

    def begins(self) -> Thinking:
        """Returns where the parser takes an answer to begin.

        Finds out by letting it read text without markers. The parser must not read other text afterwards.
        """
        if self._over:
            return Thinking.OVER
        reasoning = any(event.text for event in self.whole("x") if isinstance(event, Reasoning))
        return Thinking.OPEN if reasoning else Thinking.POSSIBLE

    def feed(self, text: str) -> list[Event]:
        """Returns the events settled by further text."""
        if self._over:
            return [Text(text)]
        if not text:
            return []
        pushed = self._history.push(text)
        events = self._events(self._parser.extract_reasoning_streaming(*pushed))
        if self._parser.engine_based_streaming:
            self._over = self._parser.has_engine_confirmed_reasoning_end()
            if self._over:
                events += self._events(self._parser.finish_streaming())
        else:
            self._over = self._parser.is_reasoning_end_streaming(pushed[4], pushed[5])
        return events

    def finish(self) -> list[Event]:
        """Returns the events held back, at the end of the text."""
        if self._over or not self._parser.engine_based_streaming:
            return []
        return self._events(self._parser.finish_streaming())

    def whole(self, text: str) -> list[Event]:
        """Returns the events of a whole text."""
        if self._over:
            return [Text(text)]
        reasoning, content = self._parser.extract_reasoning(text, self._request)
        return [Reasoning(reasoning or ""), Text(content or "")]

    def _events(self, delta: Any) -> list[Event]:
        return [] if delta is None else [Reasoning(delta.reasoning or ""), Text(delta.content or "")]


def reasoning_parser(value: str, text: TextCodec, prompt: Sequence[int]) -> ReasoningParser:
    """Returns a parser of thinking; ``prompt`` shows whether the thinking has begun or is over."""
    cls = _class(_manager(), value)
    return ReasoningParser(cls(_tokenizer(text)), _request(()), text, prompt)
