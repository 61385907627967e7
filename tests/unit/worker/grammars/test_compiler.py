"""Grammars compiled in processes of their own: limits, the cache, and what a crash costs."""

import asyncio
import json
import os
import random
import select
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from protos.errors import Internal, InvalidArgument, Overloaded, Unavailable
from tests.support.worker.grammar_harness import END, SMOLLM2, VOCAB, compiler, constraints, tokenizer
from tests.support.worker.structured_cases import schema
from worker_svc.grammars.compiler import GrammarCompiler, can_constrain
from worker_svc.grammars.compiler_limits import CompilerLimits
from worker_svc.grammars.masks import Masks
from worker_svc.grammars.matcher import Matcher
from worker_svc.grammars.spec import Spec

pytestmark = pytest.mark.skipif(not SMOLLM2.is_dir(), reason="SmolLM2 is not fetched; run make models")


@pytest.fixture
def small() -> Iterator[GrammarCompiler]:
    limits = CompilerLimits(threads=2, cpu_s=1, memory=96 << 20, cache=1_000_000)
    made = GrammarCompiler(SMOLLM2, VOCAB, [END], limits)
    yield made
    made.close()


def test_the_same_grammar_compiles_once(small: GrammarCompiler) -> None:
    """While it is under way and afterwards."""
    futures = [small.submit(Spec("regex", "[a-z]+")) for _ in range(20)]
    sizes = {future.result() for future in futures}
    assert small.submit(Spec("regex", "[a-z]+")).result() in sizes
    assert small.num_compiled == 1
    assert len(sizes) == 1


def test_the_cache_is_bounded_by_bytes(small: GrammarCompiler) -> None:
    """What was used longest ago goes first; the newest always stays."""
    specs = [
        Spec("choice", json.dumps([f"{n}-{word}" for word in ("alpha", "beta") for _ in range(300)]))
        for n in range(3)
    ]
    big = [Spec("regex", f"[a-z]{{{n}}}[0-9]+x") for n in range(2, 40)]
    for spec in [*specs, *big]:
        small.submit(spec).result()
        small.find(big[0])
    assert small.cached_bytes <= 1_000_000
    assert small.find(specs[0]) is None
    assert small.find(big[-1]) is not None


def test_a_grammar_beyond_its_limits_fails_alone(small: GrammarCompiler) -> None:
    """Time and memory are the kernel's to count; others go on meanwhile and afterwards, and the refusal is remembered."""
    slow = Spec("grammar", "root ::= " + " ".join("[a-z]*" for _ in range(2000)))
    large = Spec("json_schema", json.dumps({"anyOf": [
        {"type": "object", "properties": {f"p{i}": {"type": "string"}}, "required": [f"p{i}"]} for i in range(500)]}))  # fmt: skip
    hostile = [small.submit(slow), small.submit(large)]
    with pytest.raises(InvalidArgument, match="CPU time"):
        hostile[0].result()
    with pytest.raises(InvalidArgument, match="MiB of memory"):
        hostile[1].result()
    assert small.submit(Spec("regex", "a+")).result() > 0
    started = time.perf_counter()
    with pytest.raises(InvalidArgument, match="CPU time"):
        small.submit(slow).result()
    assert time.perf_counter() - started < 0.1


def test_a_child_that_load_or_a_crash_ended_is_not_remembered(small: GrammarCompiler) -> None:
    """What the wall clock or a signal ended is told as what it is, and tried again."""
    slow = Spec("grammar", "root ::= " + " ".join("[a-z]*" for _ in range(2000)))
    limits = small.limits
    small.limits = replace(limits, cpu_s=0.01)  # the clock's limit comes before the kernel's whole second
    with pytest.raises(Overloaded, match="busy"):
        small.submit(slow).result()
    small.limits = limits
    future = small.submit(slow)
    assert small._client is not None
    os.kill(_child_of(small._client._process.pid), signal.SIGSEGV)
    with pytest.raises(Internal, match="signal 11"):
        future.result()
    with pytest.raises(InvalidArgument, match="CPU time"):
        small.submit(slow).result()
    assert len(small._refusals) == 1


def _child_of(process: int) -> int:
    """The pid of its only child, once there is one."""
    children = Path(f"/proc/{process}/task/{process}/children")
    while not (pids := children.read_text().split()):
        os.sched_yield()
    return int(pids[0])


@pytest.mark.parametrize(
    "spec",
    [
        Spec("regex", "(.?){3000}"),
        # Cheap at first, as nothing but a quote may come: each of these takes seconds for its second or third mask.
        *[
            Spec("json_schema", json.dumps({"type": "string", "pattern": pattern}))
            for pattern in (r"^(((\w* ?)*)*(\w* ?)*)*$", r"^(((\w+ ?)+,?)+;?)+$", r"^(\w+\s?){1,20}$")
        ],
    ],
    ids=["first", "second", "third", "ordinary"],
)
def test_expensive_masks_are_a_refusal(spec: Spec) -> None:
    """The worker would make them between two steps."""
    with pytest.raises(InvalidArgument, match=r"mask of allowed tokens takes|CPU time"):
        compiler().submit(spec).result()


def test_too_large_a_spec_does_not_wait_for_others(small: GrammarCompiler) -> None:
    """It is not even queued."""
    future = small.submit(Spec("regex", "a" * 300_000))
    assert future.done()
    with pytest.raises(InvalidArgument, match="the limit is"):
        future.result()
    assert small._client is None


def test_a_grammar_in_use_is_counted_and_found(small: GrammarCompiler) -> None:
    """Evicted, it is there for as long as a matcher has it."""
    specs = [Spec("choice", json.dumps([f"{n}-{word}" for word in range(400)])) for n in range(30)]
    size = small.submit(specs[0]).result()
    grammar = small.find(specs[0])
    assert grammar is not None
    matcher = Matcher(grammar, [END], [])
    del grammar
    small.limits = replace(small.limits, cache=size * 3)
    for spec in specs[1:]:
        small.submit(spec).result()
    assert small.find(specs[0]) is not None
    assert size * 3 >= small.cached_bytes >= size
    assert small.find(specs[1]) is None
    del matcher


SLOW = Spec("grammar", "root ::= " + " ".join("[a-z]*" for _ in range(20_000)))


def children(made: GrammarCompiler) -> list[int]:
    """Processes that compile a grammar."""
    assert made._client is not None
    pid = made._client._process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def test_who_goes_takes_the_compilation_along() -> None:
    """Under way or not begun, as long as nobody else waits for it; the next one has the thread at once, and nothing is held against the grammar."""
    made = GrammarCompiler(SMOLLM2, VOCAB, [END], CompilerLimits(threads=1, cpu_s=100))
    try:
        await made.prepare(Spec("regex", "first"))
        before = children(made)
        running, joined = (asyncio.ensure_future(made.prepare(SLOW)) for _ in range(2))
        queued = [asyncio.ensure_future(made.prepare(Spec("regex", f"{n}x"))) for n in range(50)]
        while not (born := [child for child in children(made) if child not in before]):
            await asyncio.sleep(0)
        ending = os.pidfd_open(born[0])
        for task in [running, *queued]:
            task.cancel()
        await asyncio.gather(running, *queued, return_exceptions=True)
        assert not select.select([ending], [], [], 0.2)[0], "somebody still waits for it"
        joined.cancel()
        await asyncio.gather(joined, return_exceptions=True)
        assert select.select([ending], [], [], 30)[0]
        os.close(ending)
        assert await made.prepare(Spec("regex", "last")) > 0
        assert made.num_compiled == 2
        assert not made._in_progress
        assert not made._refusals
    finally:
        made.close()


def test_xgrammars_reason_reaches_the_client(small: GrammarCompiler) -> None:
    """In one line, without its source files."""
    with pytest.raises(InvalidArgument) as caught:
        small.submit(Spec("grammar", 'root ::= "a" missing')).result()
    assert caught.value.message == (
        'the grammar cannot be compiled: EBNF parser error at line 1, column 14: Rule "missing" is not defined'
    )
    assert caught.value.param == "structured_output"


def test_our_own_reasons_reach_the_client(small: GrammarCompiler) -> None:
    """As they are, from the child that checked the schema, and remembered."""
    for _ in range(2):
        with pytest.raises(InvalidArgument) as caught:
            small.submit(Spec("json_schema", '{"not": {}}')).result()
        assert caught.value.message.startswith("the JSON schema at $ has not, which cannot be enforced")
        assert caught.value.param == "structured_output"


def test_a_lost_process_is_replaced(small: GrammarCompiler) -> None:
    """The next grammar starts another one."""
    small.submit(Spec("regex", "a")).result()
    assert small._client is not None
    process = small._client._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert small.submit(Spec("regex", "b")).result() > 0


def test_a_model_without_a_vocabulary_or_end_cannot_be_constrained(tmp_path: object) -> None:
    """It does not say that it could."""
    assert can_constrain(SMOLLM2, [END])
    assert not can_constrain(SMOLLM2, [])
    assert not can_constrain(Path(str(tmp_path)), [END])


@pytest.mark.parametrize("number", range(0, 40, 5))
def test_a_matcher_and_one_that_replays_allow_the_same(number: int) -> None:
    """Along a random walk, at every token: what a preemption or a lost worker relies on."""
    import numpy as np
    import torch

    spec = Spec("json_schema", json.dumps(schema(number)))
    compiler().submit(spec).result()
    grammar = compiler().find(spec)
    assert grammar is not None
    masks = Masks(2, VOCAB, torch.device("cpu")).rows
    walker, rng = Matcher(grammar, [END], []), random.Random(number)
    output: list[int] = []
    while not walker.ended and len(output) < 40:
        walker.fill_mask(masks, 0)
        Matcher(grammar, [END], output).fill_mask(masks, 1)
        assert torch.equal(masks[0], masks[1])
        bits = np.flatnonzero(np.unpackbits(masks[0].numpy().view(np.uint8), bitorder="little"))
        token = int(rng.choice(bits))
        assert walker.accept(token)
        output.append(token)


def test_padding_and_special_tokens_are_never_allowed() -> None:
    """Ids beyond the tokenizer's own, and tokens such as <|im_start|>."""
    import torch

    made = GrammarCompiler(SMOLLM2, VOCAB + 100, [END])
    try:
        spec = Spec("regex", "(.|\n)*")
        made.submit(spec).result()
        grammar = made.find(spec)
        assert grammar is not None
        rows = Masks(1, VOCAB + 100, torch.device("cpu")).rows
        Matcher(grammar, [END], []).fill_mask(rows, 0)

        def allowed(token: int) -> bool:
            return bool(int(rows[0, token // 32]) >> (token % 32) & 1)

        assert allowed(END)
        assert allowed(tokenizer().encode("a").ids[0])
        special = tokenizer().token_to_id("<|im_start|>")
        assert special is not None
        assert not allowed(special)
        assert not any(allowed(token) for token in range(VOCAB, VOCAB + 100))
    finally:
        made.close()


def test_masks_take_out_what_is_not_allowed() -> None:
    """In the rows that are named, on the CPU's kernel as by plain tensor arithmetic."""
    import torch

    fast = Masks(3, 70, torch.device("cpu"))
    fast.rows.random_(-(2**31), 2**31)
    logits = torch.randn(3, 70)
    expected = logits.clone()
    for row in (0, 2):
        for token in range(70):
            if not int(fast.rows[row, token // 32]) >> (token % 32) & 1:
                expected[row, token] = -torch.inf
    plainly = logits.clone()
    fast.apply(logits, [0, 2])
    assert torch.equal(logits, expected)
    fast._has_kernel = False
    fast.apply(plainly, [0, 2])
    assert torch.equal(plainly, expected)


def test_an_unknown_grammar_passes() -> None:
    """A slot whose grammar was evicted can be admitted again later."""
    with pytest.raises(Unavailable):
        constraints().admit(0, Spec("regex", "not compiled"), [])
