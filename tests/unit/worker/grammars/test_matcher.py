"""What matching may cost, and what becomes of a request whose grammar costs more."""

import json
import time
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from protos.errors import Internal, InvalidArgument, Unavailable
from tests.support.worker.grammar_harness import END, SMOLLM2, VOCAB, compiler, constraints, tokenizer
from worker_svc.grammars.masks import Masks
from worker_svc.grammars.matcher import MAX_JUMP, Matcher
from worker_svc.grammars.spec import Spec

pytestmark = pytest.mark.skipif(not SMOLLM2.is_dir(), reason="SmolLM2 is not fetched; run make models")


def matcher_of(spec: Spec) -> Matcher:
    compiler().submit(spec).result()
    grammar = compiler().find(spec)
    assert grammar is not None
    return Matcher(grammar, [END], [])


def masks() -> torch.Tensor:
    return Masks(1, VOCAB, torch.device("cpu")).rows


@pytest.mark.parametrize("text", ['"a"{40000000}', '("ab"{30000}){300} "c"'])
def test_a_long_forced_text_is_not_built(text: str) -> None:
    """Whether tokens are forced is seen without it."""
    matcher = matcher_of(Spec("grammar", f"root ::= {text}"))
    started = time.thread_time()
    assert matcher.jump(masks(), 0, 900, 4) == ()  # "a", "aa" and so on are tokens: a choice
    assert matcher.accept(tokenizer().encode("a").ids[0])
    matcher.jump(masks(), 0, 900, 4)
    assert time.thread_time() - started < 0.5


def test_a_chain_is_taken_in_pieces() -> None:
    """No longer than a chunk at a time; the rest follows, and the pieces make the whole."""
    text = "\U00012000" * 300
    matcher = matcher_of(Spec("choice", json.dumps([text])))
    rows = masks()
    words = rows[0].numpy().view(np.uint32)
    chains, tokens = [], list[int]()
    while not matcher.ended:
        if chain := matcher.jump(rows, 0, 100_000, 4):
            chains.append(len(chain))
            tokens += chain
            continue
        matcher.fill_mask(rows, 0)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        tokens.append(int(allowed[0]))
        assert matcher.accept(tokens[-1])
    assert max(chains) == MAX_JUMP
    assert tokens[-1] == END
    assert tokenizer().decode(tokens[:-1]) == text


@pytest.mark.parametrize("call", ["accept_token", "fill_next_token_bitmask", "is_completed", "accept_string"])
def test_what_xgrammar_raises_is_one_requests_failure(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this slot, with the others' tokens as they are."""
    import xgrammar

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("std::bad_alloc")

    spec = Spec("regex", "a+b")
    compiler().submit(spec).result()
    several = constraints(num_slots=2)
    several.admit(0, spec, [])
    letter = tokenizer().encode("a").ids[0]
    monkeypatch.setattr(xgrammar.GrammarMatcher, call, fail)
    logits = torch.zeros(2, VOCAB)
    # The row without a grammar, and a draw that the grammar refuses where a mask is to be made.
    first = letter if call != "fill_next_token_bitmask" else 0
    choice = several.choose(
        [0, 1],
        logits,
        lambda rows: torch.tensor([first, 7] if rows is None else [first]),
        masked_first=[False, False],
        room=[9, 9],
    )
    assert isinstance(choice.errors[0], Internal)
    assert "bad_alloc" in choice.errors[0].message
    assert list(choice.errors) == [0]
    assert int(choice.tokens[1]) == 7


def test_a_grammar_that_cost_too_much_is_not_admitted_again() -> None:
    """The request fails as it was, and so does whoever sends it again, before it is compiled."""
    spec = Spec("grammar", 'root ::= x\nx ::= x x x | "a" | "b" | ""')
    compiler().submit(spec).result()
    one = constraints(num_slots=1)
    letters = [tokenizer().encode(letter).ids[0] for letter in "ab"]
    with pytest.raises(InvalidArgument, match="ambiguous"):
        one.admit(0, spec, letters * 2000)
    with pytest.raises(InvalidArgument, match="ambiguous"):
        compiler().submit(spec).result()
    with pytest.raises(Unavailable):
        one.admit(0, spec, [])


def test_drawing_again_under_the_mask_equals_drawing_under_the_mask() -> None:
    """Of 20,000 first tokens, as many are each letter as its share of those allowed says (chi-square, p > 0.001)."""
    spec = Spec("regex", "[abc][abc]")
    compiler().submit(spec).result()
    ids = torch.tensor([tokenizer().encode(letter).ids[0] for letter in "abcdefg"])
    weights = torch.tensor([0.05, 0.2, 0.1, 0.3, 0.15, 0.1, 0.1])
    generator = torch.Generator().manual_seed(0)
    slots, rounds = 50, 400
    some = constraints(num_slots=slots, min_jump=0)
    counts = torch.zeros(len(ids), dtype=torch.int64)
    for _ in range(rounds):
        for slot in range(slots):
            some.admit(slot, spec, [])
        logits = torch.zeros(slots, VOCAB)
        logits[:, ids] = weights.log()

        def draw(rows: Sequence[int] | None, logits: torch.Tensor = logits) -> torch.Tensor:
            those = logits[:, ids] if rows is None else logits[list(rows)][:, ids]
            return ids[torch.multinomial(those.softmax(-1), 1, generator=generator)[:, 0]]

        choice = some.choose(range(slots), logits, draw, masked_first=[False] * slots, room=[9] * slots)
        counts += torch.bincount(torch.searchsorted(ids, choice.tokens), minlength=len(ids))
        for slot in range(slots):
            some.release(slot)
    assert some.num_redrawn > slots * rounds * 0.6
    expected = slots * rounds * weights[:3] / weights[:3].sum()
    assert int(counts[3:].sum()) == 0
    assert float(((counts[:3] - expected) ** 2 / expected).sum()) < 13.8  # two degrees of freedom
