"""Whether a chat template expects a turn's content as text or as a list of parts.

Templates of models with images often show lists only and nothing of a text.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from gateway.schemas.base import clip
from gateway.text.cpu_time import OutOfCpuTime, limited
from protos.errors import ConfigurationRefused, InvalidArgument

Render = Callable[[Sequence[Mapping[str, Any]]], str]

_TEXT_PROBE: Final = "content probe"

# A part as Python or JSON writes it, with quotes that a text around it may escape.
_DUMPED: Final = re.compile(rf"""["']text\\*["']\s*:\s*\\*["']{_TEXT_PROBE}""")

_THOUGHT: Final = "probed thought"
_DUMPED_THOUGHT: Final = re.compile(rf"""["']thinking\\*["']\s*:\s*\\*["']{_THOUGHT}""")

# Roles of OpenAI's API. Templates may know others, such as Llama's "ipython"; clients may make them up.
_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})


def joined(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Returns content as text: its parts with line breaks between them, as in vLLM."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


# Findings that are kept, the latest ones: clients may make up any number of roles.
_MAX_KEPT: Final = 64


class ContentForm:
    """The parts of each role's content that a template shows; found out at first need."""

    def __init__(self, render: Render) -> None:
        """Calls ``render`` with short conversations, later."""
        self._render = render
        self._shows = functools.lru_cache(_MAX_KEPT)(self._probe)

    def fit(self, turn: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns ``turn`` with its content in a form that the template shows."""
        role, content = turn["role"], turn["content"]
        if isinstance(content, str):
            if not content or self._shows(role, parts=False):
                return turn
            if self._shows(role, parts=True):
                return {**turn, "content": [{"type": "text", "text": content}]}
            if role not in _ROLES:
                raise InvalidArgument(
                    f"the model's chat template does not show messages with the role '{clip(role)}'; send another role",
                    param="messages",
                )
            return turn
        # As in vLLM, a tool's result is always text.
        if role != "tool" and self._shows(role, parts=True):
            return turn
        return self.fit({**turn, "content": joined(content)})

    def _probe(self, role: str, *, parts: bool) -> bool:
        content = [{"type": "text", "text": _TEXT_PROBE}] if parts else _TEXT_PROBE
        turn = {"role": role, "content": content}
        # Most templates want a user's turn after a system's, and before an assistant's.
        user = {"role": "user", "content": [{"type": "text", "text": "u"}] if parts else "u"}
        before = [] if role in ("user", "system", "developer") else [user]
        after = [user] if role in ("system", "developer") else []
        try:
            text = self._render([*before, turn, *after])
        except (InvalidArgument, AttributeError):
            return False
        # A template for texts may write a list as Python or JSON does.
        return _TEXT_PROBE in text and not (parts and _DUMPED.search(text))


# CPU time of writing one conversation, seconds. The longest ones take a tenth of it.
_CPU_S: Final = 2

# Items of a repeated text or list, or bits of a power.
_MAX_PRODUCT: Final = 1_000_000

# Where a last turn ends that the model continues; no conversation has it.
_MARK: Final = "\ue000continue here\ue000 "


class _Generation(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}`` marks text for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it as a class attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _strftime_now(pattern: str) -> str:
    # Local time without a zone, as templates' authors saw it in training.
    return datetime.now().strftime(pattern)  # noqa: DTZ005


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Refuses large products: nothing interrupts a single operation."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        number, other = (left, right) if isinstance(left, int) else (right, left)
        size = 0
        if isinstance(number, int) and isinstance(other, int):
            bits = left.bit_length()
            size = bits * right if operator == "**" else bits + right.bit_length()
        elif isinstance(number, int) and hasattr(other, "__len__"):
            size = number * len(other)
        if size > _MAX_PRODUCT:
            raise jinja2.TemplateError(f"the result of '{operator}' is too large")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """A model's chat template."""

    variables: frozenset[str]
    """Names that the template reads from its caller. It would ignore any other."""
    knows_developer: bool
    """Whether the template handles the role "developer" itself."""
    knows_tools: bool
    """Whether the template shows tools to the model."""
    knows_calls: bool
    """Whether the template shows an assistant's calls to the model."""
    source: str
    """The Jinja text."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compiles a Jinja text for use with ``bos_token``, ``eos_token`` and so on.

        Raises:
            jinja2.TemplateSyntaxError: if ``source`` is not a template.
        """
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
        self.knows_developer = "developer" in source
        self.knows_tools = "tools" in self.variables
        self.knows_calls = "tool_calls" in source
        self.source = source
        self._contents = ContentForm(lambda turns: self._write(turns, {"add_generation_prompt": False}))

    @functools.cached_property
    def wants_system_first(self) -> bool:
        """Whether the template refuses a system message after the first turn."""
        turns = [{"role": role, "content": "probe"} for role in ("system", "user", "system", "user")]
        try:
            self.render(turns, add_generation_prompt=False)
        except InvalidArgument:
            return True
        return False

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """Returns the prompt's text for a conversation.

        Args:
            messages: dictionaries with role, content (text, or a list of parts) and further fields of a
                turn.
            add_generation_prompt: end with the header of the assistant's turn.
            variables: further variables of this template.
            tools: callable functions, in the form of OpenAI's API.
            documents: texts for the model's reference.
            continue_final_message: end within the last turn, where its content ends.

        Raises:
            InvalidArgument: if the template refuses the conversation (the message quotes it), or a variable
                is named like the template's own.
        """
        reserved = {"messages", "tools", "documents", "add_generation_prompt", *self._special_tokens}
        if taken := reserved.intersection(variables or ()):
            raise InvalidArgument(
                f"chat_template_kwargs cannot set '{clip(min(taken))}'; omit it, or send it as a parameter",
                param="chat_template_kwargs",
            )
        if continue_final_message:
            messages = _marked(messages)
        if not self.knows_developer:
            messages = [
                {**message, "role": "system"} if message["role"] == "developer" else message
                for message in messages
            ]
        given = {
            "tools": list(tools) if tools else None,
            "documents": list(documents) if documents else None,
            "add_generation_prompt": add_generation_prompt,
            **(variables or {}),
        }
        try:
            with limited(_CPU_S):
                text = self._write([self._fit(message) for message in messages], given)
        except OutOfCpuTime:
            raise InvalidArgument(
                f"the model's chat template takes more than {_CPU_S} s of CPU time for these messages; send"
                " less, or start the gateway with another --chat-template",
                param="messages",
            ) from None
        return _up_to_mark(text) if continue_final_message else text

    def _fit(self, turn: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns ``turn`` with content and thinking in a form that the template shows."""
        turn = self._contents.fit(turn)
        if not turn.get("reasoning") or not self._wants_parts_of_thinking:
            return turn
        content = turn["content"]
        if isinstance(content, str):
            content = [{"type": "text", "text": content}] if content else []
        return {**turn, "content": [{"type": "thinking", "thinking": turn["reasoning"]}, *content]}

    @functools.cached_property
    def _wants_parts_of_thinking(self) -> bool:
        """Whether the template shows thinking as a part of the content alone, as Mistral's do."""
        user, answer = {"role": "user", "content": "u"}, [{"type": "text", "text": "a"}]
        thought = {"type": "thinking", "thinking": _THOUGHT}

        def shown(content: Any, **fields: str) -> bool:
            try:
                text = self._write([user, {"role": "assistant", "content": content, **fields}], {})
            except InvalidArgument:
                return False
            return _THOUGHT in text and not _DUMPED_THOUGHT.search(text)

        named = dict.fromkeys(("reasoning", "reasoning_content", "thinking"), _THOUGHT)
        return not shown("a", **named) and shown([thought, *answer])

    def _write(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        try:
            return self._template.render(messages=messages, **{**self._special_tokens, **variables})
        except Exception as error:  # a template may divide by zero, or index what is not there
            raise InvalidArgument(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error


def _marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    *before, last = messages
    return [*before, {**last, "content": f"{joined(last['content'])}{_MARK}"}]


def _up_to_mark(text: str) -> str:
    at = text.rfind(_MARK.rstrip())
    if at < 0:
        raise InvalidArgument(
            "continue_final_message: the model's chat template does not show the last message as it is; omit it",
            param="continue_final_message",
        )
    # A template that drops the mark's space would have dropped the content's, too.
    return text[:at] if text.startswith(_MARK, at) else text[:at].rstrip()


# Signs of Jinja text, missing in names of files.
_JINJA = ("{", "}", "\n")


def read_template(setting: str | None) -> str | None:
    """Returns the template of ``--chat-template``, a file or the text itself."""
    if setting is None:
        return None
    source = setting
    if not any(sign in setting for sign in _JINJA):
        try:
            source = Path(setting).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigurationRefused(
                f"--chat-template {setting}: {reason}; give a file or the template's text"
            ) from error
    try:
        ChatTemplate(source, {})
    except jinja2.TemplateSyntaxError as error:
        raise ConfigurationRefused(f"--chat-template, line {error.lineno}: {error.message}") from error
    return source


_ANSWER: Final = "probed answer"
_PROBED_TURNS: Final[list[dict[str, Any]]] = [
    {"role": "user", "content": "probe"},
    {"role": "assistant", "content": _ANSWER, "reasoning": _THOUGHT, "reasoning_content": _THOUGHT},
]


@functools.lru_cache(_MAX_KEPT)
def end_of_thoughts(template: ChatTemplate | None, end: str) -> str:
    """Returns the text that ``template`` writes between a thought and its answer, else ``end``."""
    if template is None:
        return end
    try:
        text = template.render(_PROBED_TURNS, add_generation_prompt=False)
    except InvalidArgument:
        return end
    _, _, after = text.partition(_THOUGHT)
    between, answer, _ = after.partition(_ANSWER)
    # Anything else is not for the model to write.
    return between if answer and between.strip() == end.strip() else end
