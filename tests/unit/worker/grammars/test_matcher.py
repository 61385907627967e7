"""A matcher follows its grammar, jumps over forced tokens and can be replayed."""

import json
import random
import time

import pytest
import torch

from tests.support.worker.grammar_harness import (
    END,
    VOCAB,
    allowed,
    grammar_of,
    matcher_of,
    needs_smollm2,
    tokenizer,
)
from tests.support.worker.structured_cases import schema
from worker_svc.grammars.constraints import Masks
from worker_svc.grammars.matcher import MAX_JUMP, Matcher
from worker_svc.grammars.spec import Spec

pytestmark = needs_smollm2


def masks() -> torch.Tensor:
    """Returns memory for one mask."""
    return Masks(1, VOCAB, torch.device("cpu")).rows


@pytest.mark.parametrize("text", ['"a"{40000000}', '("ab"{30000}){300} "c"'])
def test_a_long_forced_text_is_cheap(text: str) -> None:
    """The matcher decides whether tokens are forced without building the whole text."""
    matcher = matcher_of(Spec("grammar", f"root ::= {text}"))
    started = time.thread_time()
    assert (
        matcher.take_chain(masks(), 0, 900, 4) == ()
    )  # "a", "aa" and so on are tokens, so there is a choice
    assert matcher.accept(tokenizer().encode("a").ids[0])
    matcher.take_chain(masks(), 0, 900, 4)
    assert time.thread_time() - started < 0.5


def test_long_chains_are_taken_in_pieces() -> None:
    text = "\U00012000" * 300
    matcher = matcher_of(Spec("choice", json.dumps([text])))
    rows = masks()
    chains, tokens = [], list[int]()
    while not matcher.ended:
        if chain := matcher.take_chain(rows, 0, 100_000, 4):
            chains.append(len(chain))
            tokens += chain
            continue
        tokens.append(allowed(matcher)[0])
        assert matcher.accept(tokens[-1])
    assert max(chains) == MAX_JUMP
    assert tokens[-1] == END
    assert tokenizer().decode(tokens[:-1]) == text


@pytest.mark.parametrize("number", range(0, 40, 5))
def test_a_replayed_matcher_allows_the_same_tokens(number: int) -> None:
    """Preemption and worker loss rely on this: masks are equal at every token of a random walk."""
    grammar = grammar_of(Spec("json_schema", json.dumps(schema(number))))
    walker, rng = Matcher(grammar, [END], []), random.Random(number)
    output: list[int] = []
    while not walker.ended and len(output) < 40:
        tokens = allowed(walker)
        assert allowed(Matcher(grammar, [END], output)) == tokens
        token = rng.choice(tokens)
        assert walker.accept(token)
        output.append(token)


def test_a_chain_that_is_not_taken_leaves_no_trace() -> None:
    """An end alone is too short a chain; afterwards the matcher still accepts it, and nothing behind it."""
    matcher = matcher_of(Spec("regex", "a"))
    assert matcher.accept(tokenizer().encode("a").ids[0])
    assert matcher.take_chain(masks(), 0, 900, 4) == ()
    assert (matcher.may_end, matcher.ended) == (True, False)
    assert matcher.accept(END)
    assert (matcher.may_end, matcher.ended) == (False, True)
    assert not matcher.accept(END)


@pytest.mark.parametrize(("pattern", "text", "choice"), [
    ("a", "", False), ("[ae]", "", True), ("[xy]", "", False), ("[1a]x", "", True), ("za?", "z", True), ("z", "z", False),
])  # fmt: skip
def test_a_choice_is_found_by_probes(pattern: str, text: str, choice: bool) -> None:
    matcher = matcher_of(Spec("regex", pattern))
    assert all(matcher.accept(token) for token in tokenizer().encode(text).ids)
    # The second time, what was allowed is probed first.
    assert [matcher.has_choice(), matcher.has_choice()] == [choice, choice]
