"""A stream that is cut anywhere and continued elsewhere is the stream that was not cut."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from gateway.answers.answer_plan import AnswerPlan, plan_answer
from gateway.answers.chat_stream_writer import ChatStreamWriter
from gateway.answers.chunks import ChatChunks, Chunks, ChunkWriter, CompletionChunks
from gateway.answers.generation import Generation, Timing
from gateway.answers.logprobs import Reporter
from gateway.answers.resumable import ChunkNumbers
from gateway.answers.streaming import EventStream
from gateway.metrics import Metrics
from gateway.scheduler_link.parking import Parking
from gateway.scheduler_link.pending_request import RequestGroup
from gateway.scheduler_link.request_table import Outbox, RequestTable, unread_limits
from gateway.scheduler_link.served_model import ServedModel
from gateway.schemas.base import parse
from gateway.schemas.completions import CompletionRequest
from gateway.schemas.sampling import SamplingRequest
from gateway.text.tokenization import TextWorker
from protos.triptych.v1 import common_pb2 as pb
from protos.triptych.v1 import inference_pb2 as inference
from tests.support.gateway.tool_requests import chat, served_with, settings
from tests.support.gateway.tool_templates import THINKING, WEATHER, folder_with

pytestmark = pytest.mark.property

ANSWER_ID = f"chatcmpl-{'7' * 32}"
PROMPT = (5, 6, 7)
OPTIONS = {"resumable": True, "include_usage": True}
WORDS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "get_weather", "arguments": {"city": "Pa', 'ris"}}', "\n",
    '{"name": "get_weather", "arguments": ', "{}", " ", "hello", "é", "🙂", "日本", "STOP", "ST", "<", "[1, 2]",
]  # fmt: skip


@dataclass
class Case:
    """One kind of request, and how its stream is written."""

    body: SamplingRequest
    plan: AnswerPlan

    def writer(self, served: ServedModel) -> tuple[Chunks, Callable[..., bytes]]:
        reporter = Reporter(served.text.detokenizers.token_bytes, wanted=self.body.num_logprobs is not None)
        kind = CompletionChunks if isinstance(self.body, CompletionRequest) else ChatChunks
        chunks = kind(ANSWER_ID, 1_700_000_000, "m", with_usage=True, reporter=reporter)
        if self.plan.plain:
            return chunks, chunks.write
        assert isinstance(chunks, ChatChunks)
        return chunks, ChatStreamWriter(chunks, self.plan.reader, named=self.plan.named).write


def chat_case(served: ServedModel, **fields: Any) -> Case:
    body = chat(**fields, stream=True, stream_options=OPTIONS)
    return Case(body, plan_answer(settings(), served, body, PROMPT))


def completion_case(_: ServedModel, **fields: Any) -> Case:
    options = '{"resumable": true, "include_usage": true}'
    rest = "".join(f', "{name}": {value}' for name, value in fields.items())
    content = f'{{"prompt": [5, 6, 7], "stream": true, "stream_options": {options}{rest}}}'
    return Case(parse(CompletionRequest, content.encode()), AnswerPlan())


CASES: dict[str, Callable[[ServedModel], Case]] = {
    "thinking": chat_case,
    "tools": partial(chat_case, tools=[WEATHER], n=2),
    "json": partial(chat_case, response_format={"type": "json_object"}, top_logprobs=2, logprobs=True),
    "stop strings": partial(chat_case, stop=["STOP"], n=3),
    "completion": partial(completion_case, n=2, max_tokens=500),
    "echo": partial(completion_case, echo="true", logprobs=1),
}


class Scheduler:
    """Answers one request with given tokens, as many at a time as it is told."""

    def __init__(self, case: Case, texts: list[list[int]], groups: list[int]) -> None:
        self.case, self.texts, self.groups = case, texts, groups
        self.outbox = Outbox()
        self.outbox.open()
        self.table = RequestTable(self.outbox, Parking(), resume_timeout_s=60.0)

    def request(self) -> inference.GenerateRequest:
        sampling = pb.SamplingParams(logprobs=self.case.body.num_logprobs)
        if self.case.body.num_prompt_logprobs is not None:
            sampling.prompt_logprobs = self.case.body.num_prompt_logprobs
        return inference.GenerateRequest(
            request_id="r", prompt_token_ids=PROMPT, n=len(self.texts), sampling=sampling
        )

    def event(self, sequence: int, start: int, end: int) -> inference.GenerateEvent:
        """Returns some tokens of a sequence, with its end if they are the last."""
        tokens = self.texts[sequence][start:end]
        event = inference.GenerateEvent(sequence=sequence, token_ids=tokens)
        if self.case.body.num_logprobs is not None:
            event.logprobs.extend(entry(token) for token in tokens)
        if end >= len(self.texts[sequence]):
            event.finish_reason = pb.FINISH_REASON_LENGTH
        return event

    def first(self) -> inference.GenerateEvent:
        """Returns the facts about the prompt."""
        event = inference.GenerateEvent()
        event.prompt.num_cached_tokens = 1
        event.prompt.seed = 3
        if self.case.body.num_prompt_logprobs is not None:
            event.prompt_logprobs.extend(entry(token) for token in PROMPT[1:])
        return event

    def deliver(self, pending: str, starts: dict[int, int]) -> None:
        """Delivers the rest of some sequences, in turn."""
        sizes = iter(self.groups * 1000)
        while starts:
            events = []
            for sequence, start in list(starts.items()):
                end = start + next(sizes)
                events.append(self.event(sequence, start, end))
                events[-1].request_id = pending
                starts[sequence] = end
                if events[-1].finish_reason:
                    del starts[sequence]
            self.table.deliver(inference.ConnectResponse(events=events))

    def submit(self) -> RequestGroup:
        """Begins the request and answers it."""
        group = self.table.submit([self.request()])
        first = self.first()
        first.request_id = "r"
        self.table.deliver(inference.ConnectResponse(events=[first]))
        self.deliver("r", dict.fromkeys(range(len(self.texts)), 0))
        return group

    def resume(self, known: list[int]) -> RequestGroup:
        """Continues the request where the log has ``known`` tokens of each sequence, and answers it."""
        log = [self.first()]
        log += [self.event(sequence, 0, count) for sequence, count in enumerate(known) if count]
        group = self.table.resume([self.request()], [log])
        (pending,) = group.requests
        rest = {sequence: count for sequence, count in enumerate(known) if count < len(self.texts[sequence])}
        if rest:
            sent = {one.sequence: len(one.token_ids) for one in pending.request.resumed if not one.finished}
            assert all(sent.get(sequence, 0) == count for sequence, count in rest.items())
            self.deliver(pending.wire_id, rest)
        return group


def entry(token: int) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(logprob=-0.5, rank=1, top_token_ids=[token, 9], top_logprobs=[-0.5, -2.0])


async def stream(
    case: Case, served: ServedModel, group: RequestGroup, seen: tuple[int, ...]
) -> list[tuple[str, bytes]]:
    """Returns the chunks of a stream with their ids; the end has none."""
    metrics = Metrics(lambda: "m", lambda: 0, lambda: 0, unread_limits(), lambda: 1000)
    worker = TextWorker()
    generation = Generation.begin(
        group, case.body, served, worker, Timing(metrics, lambda: 0.0, 0.0), markers=case.plan.markers,
        echoes=["prompt"] if getattr(case.body, "echo", False) else None,
    )  # fmt: skip
    written: list[bytes] = []

    async def send(message: Message) -> None:
        written.append(message.get("body", b""))

    async def receive() -> Message:
        return await asyncio.Future()

    numbers = ChunkNumbers(ANSWER_ID, seen)
    writer = ChunkWriter(*case.writer(served), with_usage=True, numbers=numbers)
    response = EventStream(generation, writer)
    await response({"type": "http"}, receive, send)
    worker.close()
    found = []
    for event in b"".join(written).split(b"\n\n")[:-1]:
        name, _, data = event.rpartition(b"\n")
        found.append((name.decode().removeprefix("id: "), data))
    return found


def by_choice(chunks: list[tuple[str, bytes]]) -> dict[bytes, list[bytes]]:
    """Returns the chunks of each choice, and those without a choice, in order."""
    found: dict[bytes, list[bytes]] = {}
    for _, data in chunks:
        choice = data.partition(b'"choices":[{"index":')[2].partition(b",")[0]
        found.setdefault(choice, []).append(data)
    return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """A model that calls tools as Qwen does, and thinks."""
    return served_with(
        folder_with(tmp_path_factory.mktemp("qwen"), THINKING, ["<tool_call>", "<think>", "</think>"])
    )


texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=10).map("".join)


@pytest.mark.parametrize("name", CASES)
@given(
    words=st.lists(texts, min_size=3, max_size=3),
    groups=st.tuples(*[st.lists(st.integers(1, 4), min_size=1, max_size=4)] * 2),
    cut=st.floats(0, 1),
    log=st.lists(st.floats(0, 1), min_size=3, max_size=3),
)
def test_any_cut_gives_the_same_stream(
    name: str,
    served: ServedModel,
    words: list[str],
    groups: tuple[list[int], list[int]],
    cut: float,
    log: list[float],
) -> None:
    """However the tokens of both runs are grouped, and whatever the log has, behind any chunk."""
    case = CASES[name](served)
    tokens = [served.text.encode(text, add_special_tokens=False) for text in words[: case.body.n]]

    async def run() -> None:
        whole = await stream(case, served, Scheduler(case, tokens, groups[0]).submit(), (0,) * len(tokens))
        numbered = [chunk for chunk in whole if chunk[0]]
        received = numbered[: 1 + int(cut * (len(numbered) - 2))]
        last = received[-1][0].rpartition(":")[2]
        seen = tuple(map(int, last.split("-")))
        known = [int(share * len(one)) for share, one in zip(log, tokens, strict=False)]
        rest = await stream(case, served, Scheduler(case, tokens, groups[1]).resume(known), seen)
        assert by_choice([*received, *rest]) == by_choice(whole)
        assert rest[-1] == whole[-1] == ("", b"data: [DONE]")

    asyncio.run(run())
