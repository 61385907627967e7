"""The same question in three APIs, collected and streamed: their answers must say the same."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

Tool = Mapping[str, Any]
"""A name and the schema of its arguments."""


@dataclass
class Answer:
    """What a client reads."""

    text: str = ""
    thinking: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    """Names, and arguments as values."""


async def answers(
    http: httpx.AsyncClient, question: str, tools: Sequence[Tool], *apis: str, **common: Any
) -> dict[str, Answer]:
    """Asks in the ``apis``, or in all of them; ``common`` are further fields of all requests."""
    turns = [{"role": "user", "content": question}]
    functions = [{"name": tool["name"], "parameters": tool["schema"]} for tool in tools]
    chat = {
        "messages": turns,
        "max_tokens": 300,
        "tools": [{"type": "function", "function": f} for f in functions],
    }
    items = {
        "input": question,
        "max_output_tokens": 300,
        "tools": [{"type": "function", **f} for f in functions],
    }
    inputs = [{"name": tool["name"], "input_schema": tool["schema"]} for tool in tools]
    messages = {"model": "smollm2", "messages": turns, "max_tokens": 300, "tools": inputs}
    found = {}
    for name, path, body in (
        ("chat", "/v1/chat/completions", chat),
        ("responses", "/v1/responses", items),
        ("messages", "/v1/messages", messages),
    ):
        if apis and name not in apis:
            continue
        collected, streamed = _READERS[name]
        response = await http.post(path, json={**body, **common})
        assert response.status_code == 200, response.text
        found[name] = collected(response.json())
        response = await http.post(path, json={**body, **common, "stream": True})
        assert response.status_code == 200, response.text
        lines = [
            line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")
        ]
        found[f"{name}, streamed"] = streamed([json.loads(line) for line in lines if line != "[DONE]"])
    return found


def _chat(body: Any) -> Answer:
    message = body["choices"][0]["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return Answer(
        message["content"] or "",
        message.get("reasoning") or "",
        [(call["name"], json.loads(call["arguments"])) for call in calls],
    )


def _chat_stream(events: Sequence[Any]) -> Answer:
    answer, arguments = Answer(), defaultdict[int, str](str)
    names: dict[int, str] = {}
    for delta in (choice["delta"] for event in events for choice in event["choices"]):
        answer.text += delta.get("content") or ""
        answer.thinking += delta.get("reasoning") or ""
        for call in delta.get("tool_calls") or ():
            names.setdefault(call["index"], call["function"].get("name"))
            arguments[call["index"]] += call["function"].get("arguments") or ""
    answer.calls = [(name, json.loads(arguments[index])) for index, name in names.items()]
    return answer


def _responses(body: Any) -> Answer:
    answer = Answer()
    for item in body["output"]:
        match item["type"]:
            case "message":
                answer.text += "".join(part["text"] for part in item["content"])
            case "reasoning":
                answer.thinking += "".join(part["text"] for part in item["content"])
            case "function_call":
                answer.calls.append((item["name"], json.loads(item["arguments"])))
    return answer


def _responses_stream(events: Sequence[Any]) -> Answer:
    answer, arguments = Answer(), defaultdict[int, str](str)
    names: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "response.output_text.delta":
                answer.text += event["delta"]
            case "response.reasoning_text.delta":
                answer.thinking += event["delta"]
            case "response.function_call_arguments.delta":
                arguments[event["output_index"]] += event["delta"]
            case "response.output_item.added" if event["item"]["type"] == "function_call":
                names[event["output_index"]] = event["item"]["name"]
    answer.calls = [(name, json.loads(arguments[index])) for index, name in names.items()]
    return answer


def _messages(body: Any) -> Answer:
    answer = Answer()
    for block in body["content"]:
        answer.text += block.get("text", "")
        answer.thinking += block.get("thinking", "")
        if block["type"] == "tool_use":
            answer.calls.append((block["name"], block["input"]))
    return answer


def _messages_stream(events: Sequence[Any]) -> Answer:
    answer, arguments = Answer(), defaultdict[int, str](str)
    names: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            names[event["index"]] = event["content_block"]["name"]
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            answer.text += delta.get("text", "")
            answer.thinking += delta.get("thinking", "")
            arguments[event["index"]] += delta.get("partial_json", "")
    answer.calls = [(name, json.loads(arguments[index])) for index, name in names.items()]
    return answer


_READERS = {
    "chat": (_chat, _chat_stream),
    "responses": (_responses, _responses_stream),
    "messages": (_messages, _messages_stream),
}
