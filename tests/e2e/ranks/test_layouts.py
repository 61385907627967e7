"""What a replica of one rank serves, every layout serves with the same tokens.

The ranks of a layout start once and serve all checks. They have so few KV blocks that long answers preempt
one another.
"""

import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from jsonschema import Draft202012Validator

from protos.triptych.v1 import common_pb2
from tests.support.campaign.processes import tiny_chat_model
from tests.support.campaign.processes.tiny_chat_model import END, FIRST_BYTE
from tests.support.ranks.questions import GREEDY, PROMPTS, SEEDED
from tests.support.ranks.replica import Answer, Replica, replica
from tests.support.reference import open_reference
from tests.support.sampling_params import constrained, sampling_params

LONG = 200
"""Tokens of a long answer. Four of them need more than twice as many blocks as there are."""
LETTER = {"enum": ["yes", "no"]}
SCHEMA = {
    "type": "object",
    "properties": {"certain": LETTER, "number": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["certain", "number"],
    "additionalProperties": False,
}

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


@dataclass(frozen=True)
class Layout:
    """A layout of ranks, and the model that they serve."""

    family: str
    tensor: int
    pipeline: int
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "-".join((self.family, f"{self.tensor}x{self.pipeline}", *self.flags[1::2]))


LAYOUTS = [
    Layout("llama", 2, 1),
    pytest.param(Layout("llama", 1, 2), marks=pytest.mark.slow),
    pytest.param(Layout("llama", 2, 2), marks=pytest.mark.slow),
    pytest.param(Layout("mixtral", 2, 1, ("--enable-expert-parallel",)), marks=pytest.mark.slow),
    pytest.param(Layout("gemma3", 2, 1, ("--window-kv", "paged")), marks=pytest.mark.slow),
    pytest.param(Layout("gemma3", 2, 2, ("--window-kv", "in-place")), marks=pytest.mark.slow),
]


@dataclass
class Expected:
    """The answers of one rank, which has enough blocks for all."""

    long: list[list[int]]
    seeded: list[list[int]]
    several: list[list[int]]
    structured: list[list[int]]
    likely: Answer


def structured() -> common_pb2.SamplingParams:
    parameters = sampling_params(temperature=1.0, seed=5, max_tokens=80)
    return constrained(parameters, "json_schema", json.dumps(SCHEMA))


def scored() -> common_pb2.SamplingParams:
    return sampling_params(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=3, prompt_logprobs=2)


class Models:
    """Models and what one rank answers with each, made when they are first needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.path = cache(self._write)
        self.expected = cache(self._expected)

    def _write(self, family: str) -> Path:
        return tiny_chat_model.write(self._folder / family, family)

    def _expected(self, family: str) -> Expected:
        logs = self._folder / f"{family}-alone"
        logs.mkdir()
        with replica(self.path(family), logs, flags=("--dtype", "float32")) as alone:
            return Expected(
                long=alone.generate_all(PROMPTS, LONG, GREEDY),
                seeded=alone.generate_all(PROMPTS, 24, SEEDED),
                several=alone.generate(PROMPTS[1], 24, SEEDED, n=3),
                structured=[answer.tokens for answer in alone.ask(PROMPTS[0], structured(), n=2)],
                likely=alone.ask(PROMPTS[1], scored())[0],
            )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@dataclass
class Running:
    """A replica of one layout, with what it must answer."""

    replica: Replica
    layout: Layout
    model: Path
    expected: Expected


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def running(
    request: pytest.FixtureRequest, models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    layout: Layout = request.param
    expected = models.expected(layout.family)
    with replica(
        models.path(layout.family), tmp_path_factory.mktemp("logs"), tensor=layout.tensor, pipeline=layout.pipeline,
        flags=("--dtype", "float32", *layout.flags), scheduler_flags=("--num-blocks", "14"),
    ) as ranks:  # fmt: skip
        yield Running(ranks, layout, models.path(layout.family), expected)
        assert all(process.poll() is None for process in ranks.ranks.values())


def test_preempted_requests_go_on(running: Running) -> None:
    before = running.replica.count("triptych:preemptions_total")
    answers = running.replica.generate_all(PROMPTS, LONG, GREEDY)
    assert running.replica.count("triptych:preemptions_total") > before
    reference = open_reference(running.model, torch.float32)
    for prompt, tokens in zip(PROMPTS, answers, strict=True):
        assert reference.greedy_mismatch(prompt, tokens) == ""
    assert answers == running.expected.long


def test_seeds_draw_what_one_rank_draws(running: Running) -> None:
    """That holds for requests that run together, and for three sequences of one."""
    assert running.replica.generate_all(PROMPTS, 24, SEEDED) == running.expected.seeded
    assert running.replica.generate(PROMPTS[1], 24, SEEDED, n=3) == running.expected.several


def test_a_cached_prefix_changes_nothing(running: Running) -> None:
    """The second request computes only what follows the two chunks that both share."""
    ranks = running.replica
    ranks.forget_prefixes()
    hits = "vllm:prefix_cache_hits_total"
    before = ranks.count(hits)
    assert ranks.generate(PROMPTS[1], 24, GREEDY) == [running.expected.long[1][:24]]
    missed = ranks.count(hits)
    assert ranks.generate(PROMPTS[2], 24, GREEDY) == [running.expected.long[2][:24]]
    assert (missed - before, ranks.count(hits) - missed) == (0, 128)


def test_a_schema_holds_on_all_ranks(running: Running) -> None:
    """Two sequences are valid, equal one rank's, and take tokens without a choice at once."""
    forced = running.replica.count("triptych:forced_tokens_total")
    answers = [answer.tokens for answer in running.replica.ask(PROMPTS[0], structured(), n=2)]
    assert answers == running.expected.structured
    assert running.replica.count("triptych:forced_tokens_total") > forced
    for *tokens, last in answers:
        assert last == END
        text = bytes(token - FIRST_BYTE for token in tokens).decode()
        Draft202012Validator(SCHEMA).validate(json.loads(text))


def test_log_probabilities_are_those_of_one_rank(running: Running) -> None:
    """Those of the prompt come from three chunks that follow one another."""
    (answer,) = running.replica.ask(PROMPTS[1], scored())
    expected = running.expected.likely
    assert answer.tokens == expected.tokens
    for ours, theirs, count in (
        (answer.logprobs, expected.logprobs, 8),
        (answer.prompt_logprobs, expected.prompt_logprobs, len(PROMPTS[1]) - 1),
    ):
        assert len(ours) == len(theirs) == count
        for one, other in zip(ours, theirs, strict=True):
            assert one.rank == other.rank
            assert [one.logprob, *one.top_logprobs] == pytest.approx(
                [other.logprob, *other.top_logprobs], abs=1e-4
            )


def test_interrupted_leases_lose_no_token(running: Running) -> None:
    """Newcomers, clients that hang up, stop tokens and short answers interrupt long answers at random."""
    generator, expected = random.Random(3), running.expected.long
    kinds = [generator.choice(("leave", "stop", "short")) for _ in range(24)]

    def disturb(place: int) -> tuple[list[int], list[int]]:
        """Returns what a request answers and what it should."""
        index, length = place % len(PROMPTS), generator.randint(1, 60)
        fields: dict[str, Any] = {**GREEDY, "ignore_eos": True, "max_tokens": LONG}
        whole, kind = expected[index], kinds[place]
        if kind == "stop":
            fields["stop_token_ids"] = [whole[length]]
            length = whole.index(whole[length]) + 1
        elif kind == "short":
            fields["max_tokens"] = length
        leave = length if kind == "leave" else None
        (answer,) = running.replica.ask(
            PROMPTS[index], common_pb2.SamplingParams(**fields), leave_after=leave
        )
        return answer.tokens[:length] if leave else answer.tokens, whole[:length]

    with ThreadPoolExecutor(4) as pool:
        long = [pool.submit(running.replica.generate, PROMPTS[index], LONG, GREEDY) for index in (0, 3)]
        for answered, right in pool.map(disturb, range(len(kinds))):
            assert answered == right
        assert [one.result() for one in long] == [[expected[0]], [expected[3]]]


def test_a_new_scheduler_configures_the_same_ranks_again(running: Running) -> None:
    """It wants other sizes, and the old one went in the middle of a lease. This test must be the last one."""
    ranks, expected = running.replica, running.expected.long
    before = dict(ranks.ranks)
    started = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        cut_off = pool.submit(ranks.generate, PROMPTS[0], LONG, GREEDY, started=started)
        assert started.wait(60)
        ranks.replace_scheduler("--max-num-seqs", "2")
        assert isinstance(cut_off.exception(), grpc.RpcError | None)
    assert ranks.generate_all(PROMPTS, 24, GREEDY) == [tokens[:24] for tokens in expected]
    assert ranks.ranks == before
