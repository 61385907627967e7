"""The grammar of gpt-oss's messages; :mod:`gateway.parsers.harmony` reads them.

The text follows the prompt's ``<|start|>assistant``. A call ends the answer, so there is only one. Neither it
nor the final message has an end marker, because the tokens for these end the output. The recipient stands
after the channel, as in OpenAI's documentation.
"""

from collections.abc import Sequence
from typing import Final

from gateway.parsers.harmony import CHANNEL, CONSTRAIN, END, FUNCTIONS, MESSAGE, ROLE, START
from gateway.tools.grammar import Callee, Tag, constant, json_schema, tag

ANY: Final[Tag] = {"type": "any_text"}


def calls(tools: Sequence[Callee]) -> Tag:
    """Returns a tag for a call of one of ``tools``, after text for the user if any."""
    header = f"{CHANNEL}commentary to={FUNCTIONS}{{}} {CONSTRAIN}json{MESSAGE}"
    tags = [tag(header.format(tool.name), json_schema(tool.schema), "") for tool in tools]
    preamble: Tag = {"type": "optional", "content": _message("commentary")}
    return {"type": "sequence", "elements": [preamble, {"type": "or", "elements": tags}]}


def answer(content: Tag = ANY) -> Tag:
    """Returns a tag for a final message with ``content``."""
    headers = [constant(f"{CHANNEL}final{MESSAGE}"), constant(f"{CHANNEL}final {CONSTRAIN}json{MESSAGE}")]
    return {"type": "sequence", "elements": [{"type": "or", "elements": headers}, content]}


def after_thinking(begun: str, messages: Tag) -> Tag:
    """Returns a tag for any thoughts and then ``messages``.

    Args:
        begun: the text of the prompt after its last ``<|start|>``.
        messages: a tag that begins with a header.
    """
    elements: list[Tag] = [{"type": "star", "content": _message("analysis")}, messages]
    if _is_open(begun):
        elements = [tag("", ANY, END), constant(START + ROLE), *elements]
    return {"type": "sequence", "elements": elements}


def is_answer(begun: str) -> bool:
    """Returns whether the prompt has begun a message for the user, after the last ``<|start|>``."""
    return _is_open(begun) and f"{CHANNEL}analysis" not in begun


def _is_open(begun: str) -> bool:
    return MESSAGE in begun and END not in begun


def _message(channel: str) -> Tag:
    """Returns a tag for a message of text, and the beginning of another."""
    elements = [tag(f"{CHANNEL}{channel}{MESSAGE}", ANY, END), constant(START + ROLE)]
    return {"type": "sequence", "elements": elements}
