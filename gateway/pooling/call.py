"""Encodes the inputs of a request to a pooling model, and asks the scheduler for their results.

Truncation cuts texts, never the special tokens around them, as in transformers.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from tokenizers import Encoding, Tokenizer

from gateway.auth.key_store import account_of
from gateway.auth.rate_limits import charge
from gateway.generation.respond import Context, chat_prompt, context_of, unique_wire_id
from gateway.generation.streaming import while_client_waits
from gateway.http.middleware import note, pass_on
from gateway.http.openapi import media
from gateway.pooling.encoding import as_bytes, as_json, description
from gateway.pooling.schemas import EmbeddingUsage, EncodedBody, InputBody, ListHead, PoolingBody
from gateway.scheduler_client.served_model import ServedModel
from gateway.text.tokenization import token_ids
from protos.errors import ContextExceeded, InvalidArgument
from protos.triptych.v1 import common_pb2 as pb
from protos.triptych.v1 import inference_pb2 as inference
from protos.validation import check_ids, count_values

# Any text with a token: it stands for texts while the tokenizer puts special tokens around them.
_SAMPLE: Final = "a"


@dataclass(frozen=True, slots=True)
class PoolInput:
    """An input of a pooling model."""

    token_ids: list[int]
    second_text_at: int = 0
    """Index of the first token of the second type; 0 if all tokens are of the first."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """How many tokens to keep; ``None`` for all."""

    total: int | None = None
    """Tokens of the whole input, special tokens included."""
    first: int | None = None
    """Tokens of the first text."""
    second: int | None = None
    """Tokens of the second text."""
    side: Literal["left", "right"] = "right"
    """Where texts lose tokens."""

    def cut_ids(self, token_ids: list[int]) -> list[int]:
        """Returns the tokens to keep of token ids."""
        if self.total is None or len(token_ids) <= self.total:
            return token_ids
        return token_ids[: self.total] if self.side == "right" else token_ids[len(token_ids) - self.total :]


def encode_text(tokenizer: Tokenizer, text: str, cuts: Cuts, *, add_special_tokens: bool = True) -> PoolInput:
    """Returns the tokens of a text."""
    found = _kept(text_ids(tokenizer, text), cuts.first, cuts)
    if not add_special_tokens:
        return PoolInput(_kept(found, cuts.total, cuts))
    if cuts.total is not None:
        found = _kept(found, cuts.total - tokenizer.num_special_tokens_to_add(is_pair=False), cuts)
    return _framed(tokenizer.encode(_SAMPLE), (found,))


def encode_pair(tokenizer: Tokenizer, first: str | Sequence[int], second: str, cuts: Cuts) -> PoolInput:
    """Returns the tokens of a pair, joined as the tokenizer joins pairs.

    A pair that is too long loses tokens of its longer text, as with transformers' ``truncation=True``.
    """
    one = _kept(text_ids(tokenizer, first) if isinstance(first, str) else list(first), cuts.first, cuts)
    two = _kept(text_ids(tokenizer, second), cuts.second, cuts)
    if cuts.total is not None:
        room = max(0, cuts.total - tokenizer.num_special_tokens_to_add(is_pair=True))
        if len(one) + len(two) > room:
            kept = min(len(one), len(two), room // 2)
            count = kept if len(one) <= len(two) else room - kept
            one, two = _kept(one, count, cuts), _kept(two, room - count, cuts)
    return _framed(tokenizer.encode(_SAMPLE, _SAMPLE), (one, two))


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the tokens of a text without special tokens."""
    return token_ids(tokenizer, text, add_special_tokens=False)


def _kept(ids: list[int], count: int | None, cuts: Cuts) -> list[int]:
    if count is None or len(ids) <= count:
        return ids
    count = max(0, count)
    return ids[:count] if cuts.side == "right" else ids[len(ids) - count :]


def _framed(sample: Encoding, texts: Sequence[list[int]]) -> PoolInput:
    """Puts texts where the tokenizer puts those of a sample, between its special tokens.

    The texts themselves are never post-processed: truncated encodings keep the rest, and a pair is made of
    every combination.
    """
    ids: list[int] = []
    types: list[int] = []
    done: set[int] = set()
    for token, kind, text in zip(sample.ids, sample.type_ids, sample.sequence_ids, strict=True):
        if text is None:
            ids.append(token)
            types.append(kind)
        elif text not in done:
            done.add(text)
            ids += texts[text]
            types += [kind] * len(texts[text])
    return PoolInput(ids, types.index(1) if 1 in types else 0)


# The most characters for the tokenizer per request, several times the longest body.
_MOST_CHARACTERS: Final = 32 * 1024 * 1024

# Values per character of the same cost: written and read.
_VALUES_PER_CHARACTER: Final = 8

# Results whose description still fits into the header that clients of HTTP read.
_MOST_DESCRIBED: Final = 400

BYTES: Final = media(
    "application/octet-stream",
    "With encoding_format bytes or bytes_only: all results, one after the other.",
    format="binary",
)
"""The media type of results as bytes, for the OpenAPI document."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PoolCall:
    """One HTTP request to a pooling model."""

    request: Request
    served: ServedModel
    body: PoolingBody

    @property
    def context(self) -> Context:
        """The gateway."""
        return context_of(self.request)

    def check_count(self, count: int, param: str) -> None:
        """Refuses too many inputs."""
        most = self.context.settings.max_inputs
        if (
            isinstance(self.body, EncodedBody)
            and self.body.encoding_format == "bytes"
            and count > _MOST_DESCRIBED
        ):
            raise InvalidArgument(
                f"encoding_format=bytes describes at most {_MOST_DESCRIBED} results in a header; send fewer inputs at"
                " once, or bytes_only",
                param="encoding_format",
            )
        if count > most:
            raise InvalidArgument(f"'{param}' has {count} texts; send at most {most} at once", param=param)

    def cuts(self, *, first: int | None = None, second: int | None = None) -> Cuts:
        """Returns the truncation of the request's inputs."""
        keep, longest = self.body.truncate_prompt_tokens, self.served.longest_input
        if keep == 0 or (keep is not None and keep > longest):
            raise InvalidArgument(
                f"truncate_prompt_tokens={keep} is not between 1 and the {longest} tokens that"
                f" '{self.served.model.served_name}' is served for; send -1 to keep as many as fit",
                param="truncate_prompt_tokens",
            )
        total = longest if keep == -1 else keep
        return Cuts(total, first or None, second or None, self.body.truncation_side)

    async def encode(self, size: int, work: Callable[[], list[PoolInput]]) -> list[PoolInput]:
        """Runs the tokenizer on texts of `size` characters in all, repetitions included."""
        if size > _MOST_CHARACTERS:
            raise InvalidArgument(
                f"the request has {size} characters once its query or prompt stands before each text;"
                f" send fewer texts at once, {_MOST_CHARACTERS} characters at most"
            )
        size = max(size, len(await self.request.body()))
        return await self.context.text_worker.run(size, work, inline=False)

    async def pool(
        self,
        inputs: Sequence[PoolInput],
        task: "pb.PoolTask.ValueType",
        *,
        param: str,
        use_activation: bool | None = None,
        dimensions: int | None = None,
    ) -> list[inference.PoolResponse]:
        """Returns the results of inputs, in their order; errors call the inputs ``param``."""
        self._check_lengths(inputs, param)
        self._check_values(inputs, pb.PoolingParams(task=task, dimensions=dimensions or 0), param)
        scope, started = self.request.scope, self.request.scope["triptych.arrived"]
        account, request_id = account_of(self.request, self.body.priority), unique_wire_id(self.request)
        note(scope, tenant=account.tenant or None)
        charge(scope, sum(len(each.token_ids) for each in inputs))
        types = self.served.model.pooling.token_types
        requests = [
            inference.PoolRequest(
                request_id=f"{request_id}-{index}",
                prompt_token_ids=each.token_ids,
                task=task,
                use_activation=use_activation,
                priority=account.priority,
                tenant=account.tenant,
                model=self.served.model.served_name,
                dimensions=dimensions or 0,
                second_text_at=each.second_text_at if types else 0,
            )
            for index, each in enumerate(inputs)
        ]
        pass_on(scope, requests)
        answers = self.context.client.pool(requests, vector_size=self.served.model.pooled_size)
        responses = await while_client_waits(self.request.receive, answers)
        note(scope, prompt_tokens=sum(len(each.token_ids) for each in inputs))
        seconds = self.context.clock() - started
        for each, response in zip(inputs, responses, strict=True):
            engine = self.context.metrics.engine(response.replica_id)
            engine.finished("stop", seconds, prompt=len(each.token_ids))
        return responses

    def _check_lengths(self, inputs: Sequence[PoolInput], param: str) -> None:
        longest = self.served.longest_input
        for each in inputs:
            count = len(each.token_ids)
            if not count:
                raise InvalidArgument(f"'{param}' is empty: it must give at least one token", param=param)
            if count > longest:
                shapes = self.served.pool_shapes
                raise ContextExceeded(
                    f"This model's maximum context length is {longest} tokens, but an input has {count} tokens and"
                    f" fits none of the shapes {shapes}; shorten it to at most {longest} tokens, or send"
                    " truncate_prompt_tokens=-1",
                    param=param,
                )

    def _check_values(self, inputs: Sequence[PoolInput], pooling: pb.PoolingParams, param: str) -> None:
        most, size = self.context.settings.max_pooled_values, self.served.model.pooled_size
        count = sum(count_values(pooling, len(each.token_ids), size) for each in inputs)
        if count > most:
            raise InvalidArgument(
                f"the results of '{param}' would have {count} values; send fewer or shorter texts at once,"
                f" {most} values at most (--max-pooled-values)",
                param=param,
            )

    async def answer_encoded(
        self,
        body: EncodedBody,
        inputs: Sequence[PoolInput],
        responses: Sequence[inference.PoolResponse],
        write: Callable[[list[Any]], Response],
    ) -> Response:
        """Returns results in the form of the request's choice."""
        results = await self.encoded(responses, body)
        if body.encoding_format in ("float", "base64"):
            return write(results)
        headers = {}
        if body.encoding_format == "bytes":
            headers["metadata"] = json.dumps(
                {
                    "id": f"embd-{self.context.new_id()}",
                    "created": int(self.context.wall_clock()),
                    "model": self.served.model.served_name,
                    "data": description(results, responses, body),
                    "usage": usage_of(inputs),
                }
            )
        return Response(b"".join(results), headers=headers, media_type="application/octet-stream")

    async def encoded(self, responses: Sequence[inference.PoolResponse], body: EncodedBody) -> list[Any]:
        """Returns the values of each result as JSON or as bytes."""
        size = sum(len(response.values) for response in responses)

        def work() -> list[Any]:
            if body.encoding_format in ("float", "base64"):
                return [as_json(response, body) for response in responses]
            return [as_bytes(response.values, body) for response in responses]

        return await self.compute(size, work)

    async def compute(self, size: int, work: Callable[[], T]) -> T:
        """Works on `size` values of results, in a thread if they are many."""
        return await self.context.text_worker.finish(size // _VALUES_PER_CHARACTER, work)

    def head(self, id_prefix: str, inputs: Sequence[PoolInput]) -> ListHead:
        """Returns the fields of a list of results other than its data."""
        return {
            "id": id_prefix + self.context.new_id(),
            "object": "list",
            "created": int(self.context.wall_clock()),
            "model": self.served.model.served_name,
            "usage": usage_of(inputs),
        }


async def encode_inputs(call: PoolCall, body: InputBody, prompt: str = "") -> list[PoolInput]:
    """Returns the tokens of each input, or of a conversation; ``prompt`` is put in front of texts."""
    cuts, served = call.cuts(), call.served
    if body.messages is not None:
        if served.text.chat_template is None:
            raise InvalidArgument(
                f"the model '{served.model.served_name}' has no chat template; send the text as 'input'",
                param="messages",
            )
        special = bool(body.add_special_tokens)
        ids = await chat_prompt(call.request, served, body.messages, body, special=special)
        return [PoolInput(cuts.cut_ids(ids))]
    call.check_count(len(body.input), "input")
    special = body.add_special_tokens is not False

    def one(given: str | list[int]) -> PoolInput:
        if isinstance(given, str):
            return encode_text(served.text.tokenizer, prompt + given, cuts, add_special_tokens=special)
        if served.model.vocab_size:
            check_ids("input", given, served.model.vocab_size)
        return PoolInput(cuts.cut_ids(given))

    size = sum(len(prompt) + len(given) for given in body.input)
    return await call.encode(size, lambda: [one(given) for given in body.input])


def usage_of(inputs: Sequence[PoolInput]) -> EmbeddingUsage:
    """Returns the usage of a request."""
    count = sum(len(each.token_ids) for each in inputs)
    return {"prompt_tokens": count, "total_tokens": count}
