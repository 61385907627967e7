"""Answers as plain values that can be compared: without ids and times, with the pieces of streams joined."""

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import httpx

from protos.triptych.v1 import common_pb2, inference_pb2

Answer: TypeAlias = Any
"""A value of JSON."""

_JOINED: Final = frozenset(("text", "content", "arguments", "reasoning", "partial_json", "delta"))
"""Texts that come in pieces."""
_VOLATILE: Final = frozenset((
    "id", "item_id", "call_id", "created", "created_at", "completed_at", "cached_tokens", "cache_write_tokens",
    "cache_read_input_tokens", "cache_creation_input_tokens", "input_tokens", "sequence_number", "cache_salt",
    "prompt_cache_key",
))  # fmt: skip
"""Fields that differ between two answers to one request."""
_TOLERANCE: Final = 1e-4
"""Log-probabilities of kernels whose sums depend on the batch differ by less."""


def plain(value: Any) -> Answer:
    """Returns a value without its volatile fields."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items() if name not in _VOLATILE}
    return [plain(item) for item in value] if isinstance(value, list) else value


async def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Returns the events of a stream.

    Raises:
        ValueError: the stream has an error, or is not whole.
    """
    events = []
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            if event.get("error") or event.get("type") == "error":
                raise ValueError(f"the stream says {line}")
            events.append(event)
    return events


def joined(events: Sequence[Mapping[str, Any]]) -> Answer:
    """Returns the answer that the events of any endpoint's stream make together."""
    if "choices" in events[0]:
        return plain(_of_choices(events))
    if events[0]["type"] == "message_start":
        return plain(_of_blocks(events))
    deltas = "".join(event["delta"] for event in events if isinstance(event.get("delta"), str))
    return plain({"end": events[-1]["type"], "deltas": deltas, "response": events[-1]["response"]})


def _of_choices(chunks: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    whole: dict[str, Any] = {}
    for chunk in chunks:
        _join(whole, chunk)
    return whole


def _of_blocks(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    blocks: dict[int, dict[str, Any]] = {}
    end: dict[str, Any] = {}
    for event in events:
        match event["type"]:
            case "content_block_start":
                blocks[event["index"]] = dict(event["content_block"])
            case "content_block_delta":
                _join(blocks[event["index"]], event["delta"])
            case "message_delta":
                _join(end, event)
    return {"content": list(blocks.values()), **end}


def _join(whole: dict[str, Any], piece: Mapping[str, Any]) -> None:
    """Adds a piece to a whole: texts and lists grow, and items with an index find their place."""
    for name, new in piece.items():
        old = whole.get(name)
        if new is None:
            whole.setdefault(name, None)
        elif isinstance(new, dict):
            _join(whole.setdefault(name, {}) if isinstance(old, dict) else _put(whole, name), new)
        elif isinstance(new, list):
            whole[name] = _joined_list(old or [], new)
        elif isinstance(new, str) and isinstance(old, str) and name in _JOINED:
            whole[name] = old + new
        else:
            whole[name] = new


def _put(whole: dict[str, Any], name: str) -> dict[str, Any]:
    made: dict[str, Any] = {}
    whole[name] = made
    return made


def _joined_list(old: list[Any], new: list[Any]) -> list[Any]:
    items = list(old)
    for item in new:
        if not (isinstance(item, dict) and "index" in item):
            items.append(item)
            continue
        place = next((each for each in items if each["index"] == item["index"]), None)
        if place is None:
            items.append(place := {})
        _join(place, item)
    return sorted(items, key=lambda item: item["index"]) if new and _indexed(new[0]) else items


def _indexed(item: Any) -> bool:
    return isinstance(item, dict) and "index" in item


async def joined_wire(events: AsyncIterator[inference_pb2.GenerateEvent], n: int) -> Answer:
    """Returns the answer of a direct gRPC client.

    Raises:
        ValueError: the request failed.
    """
    sequences: list[dict[str, Any]] = [{"tokens": [], "logprobs": []} for _ in range(n)]
    prompt: list[Answer] = []
    left, num_tokens = n, 0
    async for event in events:
        if event.HasField("error"):
            raise ValueError(f"the scheduler says {event.error.message}")
        sequence = sequences[event.sequence]
        sequence["tokens"] += event.token_ids
        sequence["logprobs"] += map(_logprobs, event.logprobs)
        prompt += map(_logprobs, event.prompt_logprobs)
        num_tokens = num_tokens or event.prompt.num_tokens
        if event.finish_reason:
            sequence["end"] = [event.finish_reason, event.stop_token_id]
            left -= 1
            if not left:
                break
    return {"sequences": sequences, "prompt": {"tokens": num_tokens, "logprobs": prompt}}


def _logprobs(entry: common_pb2.TokenLogprobs) -> Answer:
    return [entry.logprob, entry.rank, list(entry.top_token_ids), list(entry.top_logprobs)]


def differences(actual: Answer, expected: Answer, at: str = "answer") -> Iterator[str]:
    """Yields each place in which two answers differ."""
    if isinstance(actual, dict) and isinstance(expected, dict) and actual.keys() == expected.keys():
        for name, value in actual.items():
            yield from differences(value, expected[name], f"{at}.{name}")
    elif isinstance(actual, list) and isinstance(expected, list) and len(actual) == len(expected):
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            yield from differences(one, other, f"{at}[{index}]")
    elif isinstance(actual, float) and isinstance(expected, float):
        if abs(actual - expected) > _TOLERANCE:
            yield f"{at} is {actual}, alone {expected}"
    elif actual != expected:
        yield f"{at} is {actual!r}, alone {expected!r}"
