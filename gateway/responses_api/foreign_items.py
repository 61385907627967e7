"""Items of conversations that began with OpenAI's own tools, in the form of items that are served.

A call becomes a call of a function, and its output that call's result. For anything else a line of text
stands in the conversation.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from gateway.quoting import omitted
from gateway.tools.custom_tools import arguments_of

Item = dict[str, Any]
Words = str
"""A line within the assistant's turn."""


def in_served_form(kind: str, item: Item) -> Item | Words:
    """Returns what stands for an item: an item that is served, or words of the assistant.

    An unknown item is returned as it is.
    """
    convert = _FORMS.get(kind)
    return item if convert is None else convert(item)


def _call(name: str, field: str) -> Callable[[Item], Item]:
    """Returns a converter of calls whose arguments are the object in ``field``."""
    return lambda item: {
        "type": "function_call",
        "call_id": _call_id(item),
        "name": name,
        "arguments": _json(item.get(field)),
    }


def _custom_call(item: Item) -> Item:
    given = item.get("input")
    arguments = arguments_of(given) if isinstance(given, str) else given
    kept: Item = {name: item[name] for name in ("call_id", "name", "namespace") if name in item}
    return {"type": "function_call", "arguments": arguments, **kept}


def _output(item: Item) -> Item:
    output = item.get("output")
    if isinstance(output, dict):
        output = [output]
    if isinstance(output, list):
        output = [part for each in output for part in _parts(each)]
    elif not isinstance(output, str):
        output = _text(item, "status") or "completed"
    return {"type": "function_call_output", "call_id": _call_id(item), "output": output}


def _parts(output: Any) -> list[Any]:
    """Returns a result's part, or those of a shell command's output."""
    if not isinstance(output, dict) or "type" in output:
        return [output]
    streams = (_text(output, "stdout"), _text(output, "stderr"))
    outcome = output.get("outcome")
    code = outcome.get("exit_code") if isinstance(outcome, dict) else None
    ended = f"exit code {code}" if isinstance(code, int) and code else ""
    return [{"type": "text", "text": text} for text in (*streams, ended) if text]


def _tools_found(item: Item) -> Item:
    return {"type": "function_call_output", "call_id": _call_id(item), "output": omitted("tools found")}


def _user(words: Callable[[Item], str]) -> Callable[[Item], Item]:
    return lambda item: {"type": "message", "role": "user", "content": words(item)}


def _web_search(item: Item) -> Words:
    action = item.get("action")
    texts = [_text(action, name) for name in ("query", "url", "pattern")] if isinstance(action, dict) else []
    return f"[web search: {' '.join(filter(None, texts))}]" if any(texts) else omitted("web search")


def _file_search(item: Item) -> Words:
    results = item.get("results")
    texts = (
        [_text(one, "text") for one in results if isinstance(one, dict)] if isinstance(results, list) else []
    )
    queries = item.get("queries")
    asked = "; ".join(map(str, queries)) if isinstance(queries, list) else ""
    return "\n".join((f"[file search: {asked}]", *filter(None, texts)))


def _code(item: Item) -> Words:
    outputs = item.get("outputs")
    found = outputs if isinstance(outputs, list) else []
    logs = [_text(one, "logs") or omitted("image") for one in found if isinstance(one, dict)]
    return "\n".join(filter(None, (omitted("code run by OpenAI") + " " + _text(item, "code"), *logs)))


def _mcp_call(item: Item) -> Words:
    result = item.get("output") if isinstance(item.get("output"), str) else _json(item.get("error"))
    return f"[MCP call: {_text(item, 'name')} {_text(item, 'arguments')}]\n{result}"


def _approval(item: Item) -> str:
    return "[approval given]" if item.get("approve") is True else "[approval denied]"


def _omitted(kind: str, field: str = "") -> Callable[[Item], Words]:
    return lambda item: omitted(kind, item.get(field))


def _call_id(item: Item) -> Any:
    return item.get("call_id") or item.get("id")


def _text(item: Item, name: str) -> str:
    value = item.get(name)
    return value if isinstance(value, str) else ""


def _json(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise ValueError("is nested too deep; flatten it") from error


_COMPACTED: Final = _user(lambda _: omitted("compacted conversation"))

_FORMS: Final[Mapping[str, Callable[[Item], Item | Words]]] = {
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _output,
    "local_shell_call": _call("local_shell", "action"),
    "local_shell_call_output": _output,
    "shell_call": _call("shell", "action"),
    "shell_call_output": _output,
    "apply_patch_call": _call("apply_patch", "operation"),
    "apply_patch_call_output": _output,
    "computer_call": _call("computer", "action"),
    "computer_call_output": _output,
    "tool_search_call": _call("tool_search", "arguments"),
    "tool_search_output": _tools_found,
    "web_search_call": _web_search,
    "file_search_call": _file_search,
    "code_interpreter_call": _code,
    "image_generation_call": _omitted("image", "revised_prompt"),
    "mcp_call": _mcp_call,
    "mcp_list_tools": _omitted("tools of the MCP server", "server_label"),
    "mcp_approval_request": _omitted("request to approve a call of", "name"),
    "mcp_approval_response": _user(_approval),
    "program": _omitted("program"),
    "program_output": _omitted("output of a program"),
    "compaction": _COMPACTED,
    "compaction_summary": _COMPACTED,
    "context_compaction": _COMPACTED,
    "compaction_trigger": _COMPACTED,
    "additional_tools": _user(lambda _: omitted("additional tools")),
    "configuration_update": _user(lambda _: omitted("update of the configuration")),
}
"""The converter of each type of item in the openai package's types, and of those that Codex sends."""
