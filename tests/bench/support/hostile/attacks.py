"""The attacks, as a table."""

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from protos.triptych.v1 import inference_pb2
from tests.bench.support.hostile.senders import Grpc, Http, Sender, connect, generate

MODEL: Final = "smollm2"
_LIMIT: Final = 8 * 1024 * 1024
_SMALL: Final = {"model": MODEL, "prompt": "Hi there", "max_tokens": 8, "temperature": 0}


@dataclass(frozen=True)
class Attack:
    """A row of the table."""

    kind: str
    name: str
    sender: Sender
    quick: bool = False
    """Whether the quick form has it."""


def _filled(before: str, unit: str, after: str, size: int = _LIMIT) -> Callable[[], bytes]:
    """Returns a maker of a body of almost `size` bytes that repeats `unit`, whose last comma is dropped."""

    def make() -> bytes:
        repeated = unit * ((size - len(before) - len(after.encode())) // len(unit.encode()))
        return (before + repeated.removesuffix(",") + after).encode()

    return make


def _field(name: str, opening: str, unit: str, closing: str, **more: Any) -> Callable[[], bytes]:
    """Returns a maker of a completion whose field `name` fills the body."""
    start = json.dumps({**_SMALL, **more})[:-1]
    return _filled(f'{start},"{name}":{opening}', unit, f"{closing}}}")


def _chat(opening: str, unit: str, closing: str, size: int = _LIMIT) -> Callable[[], bytes]:
    message = '"messages":[{"role":"user","content":"Hi"}],' if '"messages"' not in opening else ""
    return _filled(f'{{"model":"{MODEL}","max_tokens":8,{message}{opening}', unit, f"{closing}}}", size)


def _numbered(count: int, before: str, unit: str, after: str) -> Callable[[], bytes]:
    """Returns a maker of a body with units that have their number as `#`."""

    def make() -> bytes:
        return (before + ",".join(unit.replace("#", str(i)) for i in range(count)) + after).encode()

    return make


def _json(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps({**_SMALL, **fields}).encode()


def _schema(schema: Any) -> Callable[[], bytes]:
    return lambda: json.dumps({**_SMALL, "structured_outputs": {"json": schema}}).encode()


def _grammar(text: str) -> Callable[[], bytes]:
    return _json(structured_outputs={"grammar": text})


def _regex(text: str) -> Callable[[], bytes]:
    return _json(structured_outputs={"regex": text})


def _template(text: str) -> Callable[[], bytes]:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": MODEL, "max_tokens": 8, "messages": messages, "chat_template": text}
    return lambda: json.dumps(body).encode()


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _bomb() -> bytes:
    return gzip.compress(b'{"prompt":"' + b"a" * (1 << 28), 1)


def _head(*lines: bytes) -> Callable[[str, int], bytes]:
    def make(path: str, length: int) -> bytes:
        return b"POST %b HTTP/1.1\r\ncontent-length: %d\r\n" % (path.encode(), length) + b"".join(lines)

    return make


def _length(text: bytes) -> Callable[[str, int], bytes]:
    return lambda path, _: b"POST %b HTTP/1.1\r\ncontent-length: %b\r\n" % (path.encode(), text)


def _chunked(path: str, _: int) -> bytes:
    return b"POST %b HTTP/1.1\r\ntransfer-encoding: chunked\r\n" % path.encode()


_TOKENS: Final = _filled(f'{{"model":"{MODEL}","max_tokens":1,"prompt":[', "[1],", "]}")
_STREAM: Final = _json(stream=True)
_LONG_STREAM: Final = _json(stream=True, max_tokens=1500, ignore_eos=True)
_CHAT, _TOKENIZE, _EMBED = "/v1/chat/completions", "/tokenize", "/v1/embeddings"
_WIDE: Final = {
    "type": "object",
    "properties": {f"p{i}": {"enum": [f"v{j}" for j in range(20)]} for i in range(500)},
}
_CHAIN: Final = "\n".join(f'r{i} ::= r{i + 1} r{i + 1} | "a"' for i in range(400))

ATTACKS: Final[tuple[Attack, ...]] = (
    Attack("body", "2M prompts of one token", Http(body=_TOKENS), quick=True),
    Attack("body", "2M prompts of one token, four at once", Http(body=_TOKENS, copies=4)),
    Attack("body", "4M token ids", Http(body=_filled(f'{{"model":"{MODEL}","prompt":[', "1,", "]}"))),
    Attack("body", "2M texts", Http(body=_filled(f'{{"model":"{MODEL}","prompt":[', '"a",', "]}"))),
    Attack("body", "allowed_token_ids of lists", Http(body=_field("allowed_token_ids", "[", "[1],", "]")), quick=True),
    Attack("body", "allowed_token_ids", Http(body=_field("allowed_token_ids", "[", "1,", "]"))),
    Attack("body", "stop", Http(body=_field("stop", "[", '"a",', "]"))),
    Attack("body", "bad_words", Http(body=_field("bad_words", "[", '"a",', "]"))),
    Attack("body", "logit_bias", Http(body=_numbered(600_000, '{"prompt":"a","logit_bias":{', '"#":1', "}}"))),
    Attack("body", "an unknown field", Http(body=_field("unknown", "[", '{"a":[1]},', "]")), quick=True),
    Attack("body", "equal names", Http(body=_filled('{"prompt":"a"', ',"a":1', "}"))),
    Attack("body", "brackets", Http(body=_filled('{"prompt":', "[", ""))),
    Attack("body", "a number of 8M digits", Http(body=_filled('{"prompt":"a","seed":', "9", "}"))),
    Attack("body", "messages", Http(_CHAT, _chat('"messages":[', '{"role":"user","content":"a"},', "]"))),
    Attack("body", "parts of a message", Http(
        _CHAT, _chat('"messages":[{"role":"user","content":[', '{"type":"text","text":"a"},', "]}]"),
    ), quick=True),
    Attack("body", "tools", Http(_CHAT, _chat('"tools":[', '{"type":"function","function":{"name":"f"}},', "]"))),
    Attack("body", "chat_template_kwargs", Http(_CHAT, _chat('"chat_template_kwargs":{"a":[', "[1],", "]}"))),
    Attack("body", "response_format", Http(_CHAT, _chat(
        '"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{"enum":[', "[1],", "]}}}",
    ))),
    Attack("body", "inputs of embeddings", Http(_EMBED, _filled('{"input":[', "[1],", "]}")), quick=True),
    Attack("body", "items of a response", Http("/v1/responses", _filled(
        '{"input":[', '{"role":"user","content":"a"},', "]}",
    ))),
    Attack("body", "Anthropic messages", Http("/v1/messages", _filled(
        f'{{"model":"{MODEL}","max_tokens":8,"messages":[', '{"role":"user","content":"a"},', "]}",
    ))),
    Attack("body", "gzip of 256 MiB", Http(body=_bomb, more=b"content-encoding: gzip\r\n")),
    Attack("body", "eight of nested lists", Http(
        _CHAT, _chat('"unknown":[', "[[[]]],", "]", _LIMIT - 100_000), copies=8,
    ), quick=True),
    Attack("text", "tokenize 8 MB of 1", Http(_TOKENIZE, _filled('{"prompt":"', "1", '"}')), quick=True),
    Attack("text", "tokenize 8 MB of blanks", Http(_TOKENIZE, _filled('{"prompt":"', " ", '"}'))),
    Attack("text", "tokenize 8 MB of emoji", Http(_TOKENIZE, _filled('{"prompt":"', "\N{FAMILY}", '"}'))),
    Attack("text", "tokenize with its texts", Http(_TOKENIZE, _filled('{"return_token_strs":true,"prompt":"', "a b", '"}'))),
    Attack("text", "detokenize 4M ids", Http("/detokenize", _filled('{"tokens":[', "5,", "]}"))),
    Attack("text", "a prompt of 8 MB", Http(body=_filled(f'{{"model":"{MODEL}","prompt":"', "ab ", '"}'))),
    Attack("text", "a message of one word", Http(_CHAT, _chat(
        '"messages":[{"role":"user","content":"', "a", '"}]',
    )), quick=True),
    Attack("text", "500 prompts of 90 KB", Http(
        body=_filled(f'{{"model":"{MODEL}","prompt":"', "ab ", '"}', 90_000), copies=500,
    )),
    Attack("schema", "nested 300 deep", Http(body=_schema(_nested(300))), quick=True),
    Attack("schema", "500 properties of 20 values", Http(body=_schema(_WIDE))),
    Attack("schema", "a million items", Http(body=_schema({"type": "array", "minItems": 10**6, "items": {}}))),
    Attack("schema", "a text of 10^6", Http(body=_schema({"type": "string", "minLength": 10**6}))),
    Attack("schema", "2,000 alternatives", Http(body=_schema(
        {"anyOf": [{"type": "object", "properties": {f"p{i}": {}}} for i in range(2000)]},
    ))),
    Attack("schema", "a reference to a file", Http(body=_schema({"$ref": "file:///etc/hostname"}))),
    Attack("grammar", "a chain of 400 rules", Http(body=_grammar("root ::= r0\n" + _CHAIN + '\nr400 ::= "b"'))),
    Attack("grammar", "left recursion", Http(body=_grammar('root ::= root root | "a" | ""'))),
    Attack("grammar", "{1,100000} twice", Http(body=_grammar('root ::= ([a-z]{1,100000}){1,100000}')), quick=True),
    Attack("grammar", "5 MB of alternatives", Http(body=_filled(
        '{"prompt":"a","structured_outputs":{"grammar":"root ::= \\"x\\"', '|\\"ab\\"', '"}}', 5_000_000,
    ))),
    Attack("regex", "(a|b|c){1,1000} twenty times", Http(body=_regex("(a|b|c){1,1000}" * 20)), quick=True),
    Attack("regex", "(a+)+ nested", Http(body=_regex("((((a+)+)+)+)+b"))),
    Attack("regex", ".{1,100000}", Http(body=_regex(".{1,100000}x"))),
    Attack("template", "10^5 times 10^5 rounds", Http(_CHAT, _template(
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    )), quick=True),
    Attack("template", "a text of 10^9", Http(_CHAT, _template("{{ 'a' * 1000000000 }}"))),
    Attack("header", "70 KB", Http(body=_STREAM, head=_head(b"x-a: " + b"a" * 70_000 + b"\r\n"))),
    Attack("header", "120 KB", Http(body=_STREAM, head=_head(b"x-a: " + b"a" * 120_000 + b"\r\n"), copies=20)),
    Attack("header", "2,500 names", Http(body=_STREAM, head=_head(*(b"x-%d: a\r\n" % i for i in range(2500))), copies=20)),
    Attack("header", "5,000 zeros and a length", Http(body=_STREAM, head=_length(b"0" * 5000 + b"2")), quick=True),
    Attack("half sent", "180 bodies of 7.9 MB", Http(
        _CHAT, _chat('"unknown":"', "a", '"', 7_900_000), copies=180, sent=0.8,
    ), quick=True),
    Attack("half sent", "100 chunked bodies", Http(
        _CHAT, _filled("7f0000\r\n", "a", "", 7_900_000), head=_chunked, copies=100, sent=0.8,
    )),
    Attack("half sent", "300 bodies, a byte at a time", Http(
        body=_STREAM, copies=300, sent=0.9, piece=1, pause_s=0.1,
    )),
    Attack("idle", "2,000 connections", Http(path="", copies=2000), quick=True),
    Attack("idle", "2,000 heads without an end", Http(sent=0, body=_STREAM, copies=2000)),
    Attack("gRPC", "1,500 streams", Grpc(lambda stub: stub.Generate(generate()), copies=1500)),
    Attack("gRPC", "1,500 requests on one stream", Grpc(connect(1500, generate))),
    Attack("gRPC", "1,000 cancels", Grpc(lambda stub: stub.Generate(generate(max_tokens=200)), 1000, "leave")),
    Attack("gRPC", "64 messages of 8 MB", Grpc(
        lambda stub: stub.Generate(generate(prompt=[100_000] * 2_700_000)), copies=64,
    )),
    Attack("gRPC", "4 unread streams of 1,000 requests with 20 log-probabilities", Grpc(
        connect(1000, lambda: generate(max_tokens=400, logprobs=20, ignore_eos=True)), then="hold", copies=4,
    ), quick=True),
    Attack("gRPC", "1,000 unread watches", Grpc(
        lambda stub: stub.WatchLoad(inference_pb2.WatchLoadRequest()), copies=1000, then="hold",
    )),
    Attack("stream", "1,500 streams", Http(body=_STREAM, copies=1500)),
    Attack("stream", "500 cancels", Http(body=_LONG_STREAM, copies=500, then="leave")),
    Attack("stream", "300 unread", Http(body=_LONG_STREAM, copies=300, then="hold")),
    Attack("stream", "16 unread with 20 log-probabilities", Http(body=_json(
        stream=True, max_tokens=1500, ignore_eos=True, logprobs=20, n=2,
    ), copies=16, then="hold"), quick=True),
    Attack("stream", "40 unread answers of prompts' log-probabilities", Http(body=_json(
        prompt="a b c " * 600, prompt_logprobs=20, logprobs=20, max_tokens=8, echo=True,
    ), copies=40, then="hold")),
)  # fmt: skip
"""All attacks, in groups of one kind."""
