"""Constrained slots: redraws under a mask, failures that stay within one request, and several ranks."""

import json
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from protos.errors import InvalidArgument, Unavailable
from tests.support.worker.grammar_harness import (
    END,
    VOCAB,
    compiler,
    constraints,
    needs_smollm2,
    text_of,
    tokenizer,
)
from worker_svc.grammars import matcher as matcher_module
from worker_svc.grammars.constraints import (
    BatchClock,
    Choice,
    Constraints,
    FollowingConstraints,
    LeadingConstraints,
    Masks,
)
from worker_svc.grammars.matcher import Matcher
from worker_svc.grammars.spec import Spec
from worker_svc.ranks.group import Channel

pytestmark = needs_smollm2


@pytest.mark.parametrize("rounds", [100, pytest.param(400, marks=pytest.mark.slow)])
def test_a_redraw_under_the_mask_keeps_the_distribution(rounds: int) -> None:
    """The first tokens of 50 draws a round follow the masked distribution (chi-square, p > 0.001)."""
    spec = Spec("regex", "[abc][abc]")
    compiler().submit(spec).result()
    ids = torch.tensor([tokenizer().encode(letter).ids[0] for letter in "abcdefg"])
    weights = torch.tensor([0.05, 0.2, 0.1, 0.3, 0.15, 0.1, 0.1])
    generator = torch.Generator().manual_seed(0)
    slots = 50
    some = constraints(num_slots=slots, min_jump=0)
    counts = torch.zeros(len(ids), dtype=torch.int64)
    for _ in range(rounds):
        for slot in range(slots):
            some.admit(slot, spec, [])
        logits = torch.zeros(slots, VOCAB)
        logits[:, ids] = weights.log()

        def draw(rows: Sequence[int] | None, logits: torch.Tensor = logits) -> torch.Tensor:
            chosen = logits[:, ids] if rows is None else logits[list(rows)][:, ids]
            return ids[torch.multinomial(chosen.softmax(-1), 1, generator=generator)[:, 0]]

        choice = some.choose(range(slots), logits, draw, masked_first=[False] * slots, room=[9] * slots)
        counts += torch.bincount(torch.searchsorted(ids, choice.tokens), minlength=len(ids))
        for slot in range(slots):
            some.release(slot)
    assert some.num_redrawn > slots * rounds * 0.6
    expected = slots * rounds * weights[:3] / weights[:3].sum()
    assert int(counts[3:].sum()) == 0
    assert float(((counts[:3] - expected) ** 2 / expected).sum()) < 13.8  # two degrees of freedom


def test_engine_failures_fail_one_request() -> None:
    # The part beyond the engine's limits is out of reach of the masks that the compiler makes.
    beyond = "[a-z]* " * 1000
    spec = Spec("grammar", f'root ::= [^Q]+ | "Q\U00012000" {beyond}')
    compiler().submit(spec).result()
    several = constraints(num_slots=2)
    *before, last = tokenizer().encode("Q\U00012000").ids
    several.admit(0, spec, before)
    choice = several.choose(
        [0, 1],
        torch.zeros(2, VOCAB),
        lambda rows: torch.tensor([last, 7] if rows is None else [last]),
        masked_first=[False, False],
        room=[0, 0],
    )
    assert isinstance(choice.errors[0], InvalidArgument)
    assert list(choice.errors) == [0]
    assert int(choice.tokens[1]) == 7


def test_a_grammar_over_its_budget_is_refused_from_then_on() -> None:
    # The ambiguity lies further along than the compiler's walk, which would refuse it.
    spec = Spec("grammar", 'root ::= [ab]{200} x\nx ::= x x x | "a" | "b" | ""')
    compiler().submit(spec).result()
    one = constraints(num_slots=1)
    letters = [tokenizer().encode(letter).ids[0] for letter in "ab"]
    with pytest.raises(InvalidArgument, match="ambiguous"):
        one.admit(0, spec, letters * 2000)
    with pytest.raises(InvalidArgument, match="ambiguous"):
        compiler().submit(spec).result()
    with pytest.raises(Unavailable):
        one.admit(0, spec, [])


def test_forced_tokens_are_found_before_the_draw() -> None:
    """A chain takes the place of the row's drawn token, which is never looked up; other rows keep theirs."""
    text = "\U00012000" * 20
    spec, other = Spec("choice", json.dumps([f"a{text}"])), Spec("regex", "a+b")
    for each in (spec, other):
        compiler().submit(each).result()
    several = constraints(num_slots=3)
    letter = tokenizer().encode("a").ids[0]
    several.admit(0, spec, [letter])
    several.admit(2, other, [])
    drawn = torch.tensor([7, 8, letter])
    choice = several.choose(
        [0, 1, 2], torch.zeros(3, VOCAB), lambda _: drawn, masked_first=[False] * 3, room=[90, 90, 90]
    )
    chain = choice.forced.pop(0)  # type: ignore[attr-defined]
    assert (choice.forced, choice.errors, several.num_redrawn) == ({}, {}, 0)
    assert text_of([choice.values[0], *chain]) == text
    assert chain[-1] == END
    assert choice.values[1:] == [8, letter]
    assert choice.tokens.tolist() == choice.values
    assert drawn.tolist() == [7, 8, letter]


def test_a_chain_needs_room() -> None:
    """A row whose parameters forbid jumps draws its tokens one by one."""
    spec = Spec("choice", json.dumps(["\U00012000" * 20]))
    compiler().submit(spec).result()
    one = constraints(num_slots=1)
    one.admit(0, spec, [])
    first = tokenizer().encode("\U00012000").ids[0]
    choice = one.choose(
        [0], torch.zeros(1, VOCAB), lambda _: torch.tensor([first]), masked_first=[False], room=[0]
    )
    assert (choice.values, choice.forced, choice.errors) == ([first], {}, {})


def test_masks_remove_forbidden_tokens() -> None:
    masks = Masks(3, 70, torch.device("cpu"))
    masks.rows.random_(-(2**31), 2**31)
    logits = torch.randn(3, 70)
    expected = logits.clone()
    for row in (0, 2):
        for token in range(70):
            if not int(masks.rows[row, token // 32]) >> (token % 32) & 1:
                expected[row, token] = -torch.inf
    masks.apply(logits, [0, 2])
    assert torch.equal(logits, expected)


def test_a_slow_matcher_is_charged_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, other = Spec("regex", "a+b"), Spec("regex", "a+c")
    for each in (spec, other):
        compiler().submit(each).result()
    both = constraints(num_slots=2, min_jump=0)
    both.admit(0, spec, [])
    both.admit(1, other, [])
    slow, accept = both._matchers[0], Matcher.accept

    def burn(matcher: Matcher, token: int) -> bool:
        started = time.thread_time()
        while matcher is slow and time.thread_time() - started < 0.05:
            pass
        return accept(matcher, token)

    monkeypatch.setattr(Matcher, "accept", burn)
    monkeypatch.setattr(matcher_module, "_BUDGET_S", 0.02)
    monkeypatch.setattr(compiler(), "refuse", lambda *_: None)
    drawn = torch.tensor(tokenizer().encode("a").ids * 2)
    choice = both.choose(
        [0, 1], torch.zeros(2, VOCAB), lambda _: drawn, masked_first=[False, False], room=[0, 0]
    )
    assert list(choice.errors) == [0]
    assert "CPU time" in choice.errors[0].message


def test_the_time_of_a_pass_is_divided_among_its_rows() -> None:
    """The parts add up to the pass's CPU time, nearly all of it the slow row's; a short pass is free."""
    before, clock = time.thread_time(), BatchClock()
    clock.laps.append(time.perf_counter())
    assert list(clock.shares()) == []
    while time.thread_time() - before < 0.05:
        pass
    clock.laps += [time.perf_counter()] * 2
    shares = clock.shares()
    assert len(shares) == 3
    assert sum(shares) == pytest.approx(time.thread_time() - before, rel=0.1)
    assert shares[1] > 0.8 * sum(shares)


SPEC = cast("Spec", None)
LOGITS = torch.zeros(4, 10)


class Wire:
    """A channel within one process."""

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()

    def send(self, message: bytes) -> None:
        self._messages.append(message)

    def receive(self) -> bytes:
        return self._messages.popleft()


class Own:
    """Matchers that choose 5 and force 6 behind it in slot 1; slot 3 has no grammar in the cache."""

    def admit(self, slot: int, *_: Any) -> None:
        if slot == 3:
            raise Unavailable("the grammar is not compiled")

    def release(self, slot: int) -> None:
        del slot

    def any_constrained(self, slots: Any) -> bool:
        return 1 in slots

    def choose(self, slots: Any, *_: Any, **__: Any) -> Choice:
        values = [5 if slot == 1 else 2 for slot in slots] + [0] * (4 - len(slots))
        return Choice(torch.tensor(values), values, {1: (6,)} if 1 in slots else {})


def pair() -> tuple[LeadingConstraints, FollowingConstraints]:
    channel = cast("Channel", Wire())
    leading = LeadingConstraints(cast("Constraints", Own()), channel, has_peers=True)
    return leading, FollowingConstraints(channel)


def test_ranks_agree_on_what_a_grammar_chose() -> None:
    leading, following = pair()
    for each in (leading, following):
        each.admit(1, SPEC, ())
    chosen = leading.choose((0, 1), LOGITS, cast("Any", None), masked_first=(), room=())
    taken = following.choose((0, 1), LOGITS, cast("Any", None), masked_first=(), room=())
    assert taken.values == chosen.values == [2, 5, 0, 0]
    assert taken.forced == chosen.forced == {1: (6,)}
    assert taken.tokens.tolist() == chosen.tokens.tolist()


def test_a_refused_grammar_keeps_its_row() -> None:
    """All ranks run the row, and its request gets the error in place of a token."""
    leading, following = pair()
    for each in (leading, following):
        each.admit(3, SPEC, ())
        assert each.any_constrained((3,))
    leading.choose((3,), LOGITS, cast("Any", None), masked_first=(), room=())
    taken = following.choose((3,), LOGITS, cast("Any", None), masked_first=(), room=())
    assert isinstance(taken.errors[3], Unavailable)
    leading.release(3)
    following.release(3)
    assert not leading.any_constrained((3,))
    assert not following.any_constrained((3,))
