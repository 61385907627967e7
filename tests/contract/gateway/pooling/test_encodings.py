"""Results in the forms that vLLM's clients ask for, over real HTTP and real gRPC."""

import array
import base64
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch

from gateway.pooling.encoding import as_bytes
from gateway.pooling.schemas import PoolingRequest
from protos.triptych.v1 import common_pb2 as pb
from tests.support.gateway.fake_scheduler import FakeScheduler
from tests.support.gateway.serving import Stack, minilm_folder, stack_over

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

# The last ones lie between two numbers of 16 bits, are ties, or overflow float16.
VALUES = [0.0, -1.5, 3.14159265, 1e-5, 1.00390625, 1.01171875, 70000.0, -0.1]

TEMPLATE = (
    "{% for turn in messages %}{{ turn.role }}: {{ turn.content }} {% endfor %}{{ mood | default('') }}"
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """An embedding model with a chat template."""
    folder: Path = tmp_path_factory.mktemp("minilm")
    for path in minilm_folder().iterdir():
        shutil.copy(path, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    scheduler = FakeScheduler(
        folder,
        model="minilm",
        pooled_size=len(VALUES),
        pool_tasks=(pb.POOL_TASK_EMBED,),
        pool_values=lambda request: [value * request.prompt_token_ids[0] for value in VALUES],
    )
    async with stack_over(scheduler, max_inputs=1000) as stack:
        yield stack


async def post(stack: Stack, path: str = "/v1/embeddings", /, **body: Any) -> httpx.Response:
    response = await stack.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response


DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def read(part: bytes, dtype: str, endianness: str) -> torch.Tensor:
    """Returns the numbers in bytes as a client of vLLM reads them."""
    numbers = array.array({4: "I", 2: "H", 1: "B"}[DTYPES[dtype].itemsize], part)
    if endianness == "big":
        numbers.byteswap()
    return torch.frombuffer(bytearray(numbers.tobytes()), dtype=DTYPES[dtype]).float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("endianness", ["native", "little", "big"])
async def test_numbers_are_those_that_torch_converts(stack: Stack, dtype: str, endianness: str) -> None:
    """In base64, in the bytes with their description, and in the bytes alone."""
    form: dict[str, Any] = {"input": [[1], [2]], "embed_dtype": dtype, "endianness": endianness}
    body = (await post(stack, **form, encoding_format="base64")).json()
    expected = [
        torch.tensor([value * times for value in VALUES]).to(DTYPES[dtype]).float() for times in (1, 2)
    ]
    for entry, numbers in zip(body["data"], expected, strict=True):
        assert torch.equal(read(base64.b64decode(entry["embedding"]), dtype, endianness), numbers)
    for path in ("/v1/embeddings", "/pooling"):
        described = await post(stack, path, **form, encoding_format="bytes")
        assert described.headers["content-type"] == "application/octet-stream"
        metadata = json.loads(described.headers["metadata"])
        assert metadata["usage"] == {"prompt_tokens": 2, "total_tokens": 2}
        for index, (item, numbers) in enumerate(zip(metadata["data"], expected, strict=True)):
            part = described.content[item.pop("start") : item.pop("end")]
            assert torch.equal(read(part, dtype, endianness), numbers)
            about = {"embed_dtype": dtype, "endianness": endianness, "shape": [len(VALUES)]}
            assert item == {"index": index, **about}
        alone = await post(stack, path, **form, encoding_format="bytes_only")
        assert "metadata" not in alone.headers
        assert alone.content == described.content


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
async def test_numbers_of_8_bits_are_torchs(dtype: str) -> None:
    """Every number of 16 bits, and its neighbours, which lie beside the middles between two codes."""
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    floats = torch.cat([halves, halves * 1.0001, halves * 0.9999, torch.tensor([1e9, -1e9, 1e-9, 2**-17])])
    body = PoolingRequest.model_validate({"input": "a", "embed_dtype": dtype})
    codes = torch.frombuffer(bytearray(as_bytes(floats.tolist(), body)), dtype=torch.uint8)
    assert torch.equal(codes, floats.to(DTYPES[dtype]).view(torch.uint8))


async def test_a_description_must_fit_into_a_header(stack: Stack) -> None:
    """More results than clients can read the header of are refused, and have bytes_only."""
    many = [[1]] * 401
    status, error = await stack.refusal("/v1/embeddings", input=many, encoding_format="bytes")
    assert (status, error["param"]) == (400, "encoding_format")
    assert "at most 400 results" in error["message"]
    alone = await post(stack, input=many, encoding_format="bytes_only")
    assert len(alone.content) == 401 * 4 * len(VALUES)
    assert len((await post(stack, input=many[1:], encoding_format="bytes")).headers["metadata"]) < 60_000


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
async def test_a_conversation_is_one_input(stack: Stack, path: str) -> None:
    """The chat template writes it, with the client's variables; the client chooses special tokens."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    sent: dict[str, Any] = {"messages": messages, "chat_template_kwargs": {"mood": "glad"}}
    body = (await post(stack, path, **sent)).json()
    await post(stack, path, **sent, add_special_tokens=True)
    plain, special = (list(each.prompt_token_ids) for each in stack.scheduler.pooled)
    text = (await post(stack, "/detokenize", tokens=plain)).json()["prompt"]
    assert text == "user : hi assistant : ho glad"
    assert special[1:-1] == plain
    assert len(body["data"]) == 1
    short = await post(stack, path, messages=messages, truncate_prompt_tokens=2)
    assert short.json()["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({}, "input", "is required: send it, or 'messages'"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "user", "content": "b"}], "documents": [{"text": "c"}]}, "documents", "messages alone"),
        ({"input": "a", "messages": [{"role": "user", "content": "b"}]}, "input", "exclude each other"),
        ({"messages": [{"role": "user", "content": "b"}], "prompt": "c"}, "prompt", "need inputs that are texts"),
        ({"input": "a", "embed_dtype": "int8"}, "embed_dtype", "'bfloat16', 'fp8_e4m3' or 'fp8_e5m2'"),
        ({"input": "a", "endianness": "middle"}, "endianness", "'native', 'big' or 'little'"),
    ],
)  # fmt: skip
async def test_an_invalid_form_is_refused(stack: Stack, body: dict[str, Any], param: str, text: str) -> None:
    status, error = await stack.refusal("/v1/embeddings", **body)
    assert (status, error["param"]) == (400, param)
    assert text in error["message"]
