"""Chat templates: Jinja, rendered as transformers renders them (``transformers.utils.chat_template_utils``), without importing it.

transformers would import torch wherever torch is installed (175 MB and a second, measured with 5.17); the rendering itself is a page.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from gateway.quoting import clip
from protos.errors import InvalidArgument


class _Generation(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's text for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

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
    # Local time without zone: what the template's authors saw in training.
    return datetime.now().strftime(pattern)  # noqa: DTZ005


class ChatTemplate:
    """One model's chat template.

    Attributes:
        variables: names that the template reads from its caller; any other one would be ignored by it.
        knows_developer: whether it treats the role "developer" by itself.
        knows_tools: whether it shows tools to the model.
        knows_calls: whether it shows an assistant's calls to the model.
        source: the Jinja text.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compiles ``source``.

        Args:
            source: Jinja text.
            special_tokens: ``bos_token``, ``eos_token``, … for the template's use.

        Raises:
            jinja2.TemplateSyntaxError: if it is not a template.
        """
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
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

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt's text for a conversation.

        Args:
            messages: role and content each, and what else turns have.
            add_generation_prompt: end with the header of the assistant's turn.
            variables: further variables of this template.
            tools: what may be called, as OpenAI's API has it.

        Raises:
            InvalidArgument: if the template refuses the conversation (its own words are in the message) or does not know a variable.
        """
        reserved = {"messages", "tools", "documents", "add_generation_prompt", *self._special_tokens}
        for name in variables or ():
            if name in reserved or name not in self.variables:
                raise InvalidArgument(
                    f"chat_template_kwargs: this model's chat template takes no variable '{clip(name)}'",
                    param="chat_template_kwargs",
                )
        if not self.knows_developer:
            messages = [
                {**message, "role": "system"} if message["role"] == "developer" else message
                for message in messages
            ]
        try:
            return self._template.render(
                messages=messages,
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self._special_tokens, **(variables or {})},
            )
        except (jinja2.TemplateError, TypeError, ValueError, RecursionError) as error:
            raise InvalidArgument(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
