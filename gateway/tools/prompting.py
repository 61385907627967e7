"""Tools and calls in the prompts of models whose chat templates know neither.

Such models can still be made to call (their output is constrained), so they are told in plain words what there is to call and what they
have called. What is told is in the form that they are held to.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gateway.text.chat_template import ChatTemplate
from protos.errors import InvalidArgument

_INTRODUCTION: Final = (
    "You can call these functions, described in JSON. To call some, answer with nothing but a JSON list of objects with "
    '"name" and "parameters":'
)


def show_tools_in_words(
    template: ChatTemplate, turns: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """``turns`` with everything in their contents that ``template`` would not show.

    Args:
        template: the model's.
        turns: the conversation, for the template.
        tools: what the model is to know of.
    """
    told = [_calls_in_words(turn) if not template.knows_calls else turn for turn in turns]
    if not tools or template.knows_tools:
        return told
    text = "\n".join([_INTRODUCTION, *(_json(tool["function"]) for tool in tools)])
    # Every template takes a user's turn; not every one takes a system's.
    for at, turn in enumerate(told):
        if turn["role"] in ("system", "developer"):
            told[at] = {**turn, "content": f"{turn['content']}\n\n{text}"}
            return told
        if turn["role"] == "user":
            told[at] = {**turn, "content": f"{text}\n\n{turn['content']}"}
            return told
    return [{"role": "system", "content": text}, *told]


def _calls_in_words(turn: dict[str, Any]) -> dict[str, Any]:
    if not (calls := turn.get("tool_calls")):
        return turn
    text = _json(
        [{"name": call["function"]["name"], "parameters": call["function"]["arguments"]} for call in calls]
    )
    content = turn["content"]
    return {**turn, "content": f"{content}\n{text}" if content else text}


def _json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise InvalidArgument(
            "arguments of an earlier call are nested too deeply", param="messages"
        ) from error
