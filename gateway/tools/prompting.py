"""Tools and calls as plain text in prompts, for models whose chat templates handle neither.

Such models can still call tools because their output is constrained. The prompt describes the functions and
earlier calls in the format of that constraint.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gateway.text.chat_template import ChatTemplate, joined
from protos.errors import InvalidArgument

_INTRODUCTION: Final = (
    "You can call these functions, described in JSON. To call some, answer with nothing but a JSON list of"
    ' objects with "name" and "parameters":'
)


def show_tools_in_words(
    template: ChatTemplate, turns: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Returns ``turns`` with descriptions of the tools and calls that ``template`` would not show.

    Args:
        template: the model's.
        turns: the conversation, in the template's form.
        tools: the tools to describe.
    """
    described = [_calls_in_words(turn) if not template.knows_calls else turn for turn in turns]
    if not tools or template.knows_tools:
        return described
    text = "\n".join([_INTRODUCTION, *(_json(tool["function"]) for tool in tools)])
    # Every template accepts a user's turn; some refuse a system's.
    for at, turn in enumerate(described):
        if turn["role"] in ("system", "developer"):
            described[at] = {**turn, "content": f"{joined(turn['content'])}\n\n{text}"}
            return described
        if turn["role"] == "user":
            described[at] = {**turn, "content": f"{text}\n\n{joined(turn['content'])}"}
            return described
    return [{"role": "system", "content": text}, *described]


def _calls_in_words(turn: dict[str, Any]) -> dict[str, Any]:
    if not (calls := turn.get("tool_calls")):
        return turn
    text = _json(
        [{"name": call["function"]["name"], "parameters": call["function"]["arguments"]} for call in calls]
    )
    content = joined(turn["content"])
    return {**turn, "content": f"{content}\n{text}" if content else text}


def _json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise InvalidArgument(
            "the arguments of an earlier call are nested too deep; flatten them", param="messages"
        ) from error
