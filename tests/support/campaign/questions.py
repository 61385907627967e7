"""The requests of a campaign: each can be asked again and again, and always has the same answer."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from protos.triptych.v1 import common_pb2, inference_pb2
from tests.support.campaign.processes.tiny_chat_model import END, PRINTABLE

Way: TypeAlias = Literal["http", "grpc"]
Kind: TypeAlias = Literal["greedy", "seeded", "json", "choices", "logprobs", "regex", "grammar"]

KINDS: Final[tuple[Kind, ...]] = ("greedy", "seeded", "json", "choices", "logprobs", "regex", "grammar")
SCHEMA: Final = json.dumps({
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "values": {"type": "array", "items": {"type": "integer", "maximum": 99999}, "maxItems": 12},
        "good": {"type": "boolean"},
    },
    "required": ["name", "values", "good"],
    "additionalProperties": False,
})  # fmt: skip
_REGEX: Final = "[a-z]{1,9}( [a-z]{1,9}){10,60}"
_GRAMMAR: Final = 'root ::= word | word " " root\nword ::= [a-z] | [a-z] word'
# By kind: the constraint of an HTTP body, and of a message.
_CONSTRAINTS: Final[Mapping[Kind, tuple[Mapping[str, Any], Mapping[str, Any]]]] = {
    "json": ({"json": json.loads(SCHEMA)}, {"json_schema": SCHEMA}),
    "regex": ({"regex": _REGEX}, {"regex": _REGEX}),
    "grammar": ({"grammar": _GRAMMAR}, {"grammar": _GRAMMAR}),
}


@dataclass(frozen=True, eq=False)
class Question:
    """One request, without its id."""

    name: str
    way: Way
    """Through the gateway's HTTP stream, or directly by gRPC."""
    kind: Kind
    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that HTTP and gRPC call the same."""

    def http_body(self, model: str) -> dict[str, Any]:
        """Returns the body for /v1/completions."""
        body = {
            "model": model, "prompt": list(self.prompt), "max_tokens": self.max_tokens, "n": self.n, "stream": True,
            "stream_options": {"include_usage": True}, **self.sampling,
        }  # fmt: skip
        if self.kind in _CONSTRAINTS:
            body["structured_outputs"], _ = _CONSTRAINTS[self.kind]
        return body

    def message(self, request_id: str) -> inference_pb2.GenerateRequest:
        """Returns the message for `Inference.Generate`."""
        sampling = common_pb2.SamplingParams(max_tokens=self.max_tokens, **self.sampling)
        if self.kind in _CONSTRAINTS:
            _, constraint = _CONSTRAINTS[self.kind]
            sampling.structured_output.MergeFrom(common_pb2.StructuredOutput(**constraint))
        return inference_pb2.GenerateRequest(
            request_id=request_id, prompt_token_ids=self.prompt, n=self.n, sampling=sampling
        )


def make_questions(count: int, dice: random.Random) -> list[Question]:
    """Returns questions of all kinds and ways; prompts differ in length, and some share a prefix."""
    shared = tuple(dice.choices(PRINTABLE, k=300))
    questions = []
    for index in range(count):
        kind = KINDS[index // 2 % len(KINDS)]
        own = tuple(dice.choices(PRINTABLE, k=dice.choice((3, 40, 150, 300))))
        sampling: dict[str, Any] = {"temperature": 0}
        if kind in {"seeded", "choices"} or (kind not in {"greedy", "seeded"} and dice.random() < 0.5):
            sampling = {"temperature": 0.9, "top_p": 0.95, "seed": dice.randrange(1 << 32)}
        # Each token is a character of its own, so a text says which tokens it has.
        sampling |= {"allowed_token_ids": [*PRINTABLE, END]} if kind in _CONSTRAINTS else {
            "allowed_token_ids": list(PRINTABLE), "ignore_eos": True,
        }  # fmt: skip
        if kind == "logprobs":
            sampling["logprobs"] = dice.choice((0, 1, 5))
        questions.append(Question(
            f"{kind}-{index}", "http" if index % 2 else "grpc", kind,
            (*(shared if dice.random() < 0.3 else ()), *own), dice.randrange(60, 400),
            n=dice.choice((2, 3)) if kind == "choices" else 1, sampling=sampling,
        ))  # fmt: skip
    return questions
