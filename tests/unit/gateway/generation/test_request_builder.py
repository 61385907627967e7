"""Prompts and wire requests from HTTP bodies."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from gateway.generation.request_builder import check_length, encode_chat, generate_requests, sampling_of
from gateway.openai.completions import CompletionRequest
from gateway.scheduler_client.served_model import ServedModel
from gateway.schemas.base import parse
from gateway.schemas.chat import ChatCompletionRequest
from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenization import TextCodec, TextWorker
from protos.errors import ContextExceeded, InvalidArgument
from protos.triptych.v1 import common_pb2 as pb
from tests.support.gateway.serving import smollm2_folder


def body_of(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({"prompt": "hi", **fields}).encode())


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec.load(smollm2_folder())


@pytest.fixture
def served(codec: TextCodec) -> ServedModel:
    return ServedModel(pb.ModelInfo(served_name="smol", vocab_size=49152, max_model_len=64), codec)


def test_everything_arrives() -> None:
    """Each parameter has its field on the wire."""
    body = body_of(
        temperature=0, top_p=0.5, top_k=7, min_p=0.25, seed=9, max_tokens=11, min_tokens=2, stop_token_ids=[5],
        ignore_eos=True, presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.5, logit_bias={"3": -1.0},
        allowed_token_ids=[3, 4],
    )  # fmt: skip
    assert sampling_of(body, pb.ModelInfo()) == pb.SamplingParams(
        temperature=0, top_p=0.5, top_k=7, min_p=0.25, seed=9, max_tokens=11, min_tokens=2, stop_token_ids=[5],
        ignore_eos=True, presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.5, logit_bias={3: -1.0},
        allowed_token_ids=[3, 4],
    )  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {"top_p": 1},
        {"top_k": -1},
        {"top_k": 0},
        {"min_p": 0},
        {"repetition_penalty": 1},
        {"presence_penalty": 0},
    ],
)
def test_a_value_that_disables_a_filter_stays_unset(fields: dict[str, Any]) -> None:
    assert sampling_of(body_of(**fields), pb.ModelInfo()) == pb.SamplingParams(max_tokens=16)


def test_the_models_defaults_fill_the_gaps() -> None:
    model = pb.ModelInfo(default_sampling=pb.SamplingParams(temperature=0.5, top_p=0.75, top_k=20))
    params = sampling_of(body_of(temperature=0.25, top_k=-1), model)
    assert (params.temperature, params.top_p) == (0.25, 0.75)
    assert not params.HasField("top_k")
    assert not sampling_of(body_of(top_p=1.0), model).HasField("top_p")


def test_the_models_default_length_counts_as_far_as_it_fits(served: ServedModel) -> None:
    """A chat without max_tokens gets what generation_config.json says, or the rest of the context."""
    served.model.default_sampling.max_tokens = 50
    chat = parse(ChatCompletionRequest, b'{"messages": [{"role": "user", "content": "x"}], "min_tokens": 2}')
    requests = generate_requests(served, chat, [[1] * 4, [1] * 60, [1] * 63], "id")
    assert [request.sampling.max_tokens for request in requests] == [50, 4, 2]
    assert generate_requests(served, body_of(), [[1]], "id")[0].sampling.max_tokens == 16


@pytest.mark.parametrize(("seed", "wire"), [(0, 0), (7, 7), (-1, 2**64 - 1)])
def test_seeds_fit_64_bits(seed: int, wire: int) -> None:
    assert sampling_of(body_of(seed=seed), pb.ModelInfo()).seed == wire


@pytest.mark.parametrize(
    "fields", [{"stop_token_ids": [49152]}, {"allowed_token_ids": [5, 49152]}, {"logit_bias": {"49152": 1}}]
)
def test_token_ids_must_be_in_the_vocabulary(served: ServedModel, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="49151") as caught:
        sampling_of(body_of(**fields), served.model)
    assert caught.value.param in fields


@pytest.mark.parametrize(("count", "limit"), [(63, None), (63, 1), (1, 63), (32, 32)])
def test_prompt_and_output_may_fill_the_context(served: ServedModel, count: int, limit: int | None) -> None:
    check_length(served, [1] * count, limit, param="prompt")
    for more, longer in ((count + 1, limit), (count, (limit or 1) + 1)):
        with pytest.raises(ContextExceeded):
            check_length(served, [1] * more, longer, param="prompt")
    with pytest.raises(InvalidArgument, match="is empty"):
        check_length(served, [], limit, param="prompt")


MODEL = pb.ModelInfo(served_name="smol", vocab_size=49152, max_model_len=64)
SOURCE = "{{ reasoning_effort }}{{ enable_thinking }}{{ documents }}{{ mood }}|{{ messages[0].content }}"


@pytest_asyncio.fixture
async def worker() -> AsyncIterator[TextWorker]:
    made = TextWorker()
    yield made
    made.close()


async def encoded(worker: TextWorker, codec: TextCodec, size: int = 50, **fields: Any) -> str:
    content = {"messages": [{"role": "user", "content": "hi"}], **fields}
    body = parse(ChatCompletionRequest, json.dumps(content).encode())
    served = ServedModel(MODEL, codec)
    ids = await encode_chat(
        served, worker, body.messages, body, defaults={}, may_call=True, special=False, size=size
    )
    return codec.decode(ids)


def with_template(codec: TextCodec, source: str | None) -> TextCodec:
    return TextCodec(codec.tokenizer, ChatTemplate(source, {}) if source else None, {})


async def test_a_chat_needs_a_template(worker: TextWorker, codec: TextCodec) -> None:
    """A chat with a base model is refused with the endpoint that works."""
    end = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (await encoded(worker, codec)).endswith(end)
    with pytest.raises(InvalidArgument, match="no chat template; use /v1/completions"):
        await encoded(worker, with_template(codec, None))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "None|hi"),
        ({"reasoning_effort": "low"}, "lowTrueNone|hi"),
        ({"reasoning_effort": "none"}, "noneFalseNone|hi"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, "lowFalseNone|hi"),
        ({"documents": [{"title": "a"}]}, "[{'title': 'a'}]|hi"),
        ({"chat_template_kwargs": {"mood": "bad", "other": 1}}, "Nonebad|hi"),
    ],
)
async def test_parameters_reach_the_template(
    worker: TextWorker, codec: TextCodec, fields: dict[str, Any], text: str
) -> None:
    assert await encoded(worker, with_template(codec, SOURCE), **fields) == text


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "low"},
        {"documents": [{"a": "b"}]},
        {"chat_template_kwargs": {"mood": 1}},
    ],
)
async def test_parameters_that_the_template_does_not_read(
    worker: TextWorker, codec: TextCodec, fields: dict[str, Any]
) -> None:
    """They change nothing, so they are accepted."""
    plain = with_template(codec, "{{ messages[0].content }}")
    assert await encoded(worker, plain, **fields) == "hi"
