"""Grammars compile in processes with limits; the cache, crashes and cancellation."""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import psutil
import pytest
import torch

from protos.errors import InvalidArgument, Overloaded, Unavailable
from tests.support.paths import ROOT
from tests.support.worker.grammar_harness import (
    END,
    SMOLLM2,
    VOCAB,
    allowed,
    compiler,
    matcher_of,
    needs_smollm2,
    tokenizer,
)
from worker_svc.grammars.compiler import CompilerLimits, GrammarCompiler, can_constrain
from worker_svc.grammars.constraints import Masks
from worker_svc.grammars.spec import Spec

pytestmark = needs_smollm2

# Takes seconds to compile.
SLOW = Spec("json_schema", json.dumps({"properties": {
    f"p{i}": {"type": "string", "pattern": f"^(?=.*{i}).*[a-z]{{2,{i + 5}}}$", "minLength": 3} for i in range(1000)
}}))  # fmt: skip


@pytest.fixture
def small() -> Iterator[GrammarCompiler]:
    limits = CompilerLimits(threads=2, cpu_s=1, compile_bytes=96 << 20, cache_bytes=1_000_000)
    made = GrammarCompiler(SMOLLM2, VOCAB, [END], limits)
    yield made
    made.close()


def compiling() -> set[psutil.Process]:
    """Returns this process's children that compile grammars."""
    return {
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE
        and any("compile_server" in word for word in child.cmdline())
    }


def only(processes: set[psutil.Process]) -> psutil.Process:
    [process] = processes
    return process


def test_the_same_grammar_compiles_once(small: GrammarCompiler) -> None:
    futures = [small.submit(Spec("regex", "[a-z]+")) for _ in range(20)]
    sizes = {future.result() for future in futures}
    assert small.submit(Spec("regex", "[a-z]+")).result() in sizes
    assert small.num_compiled == 1
    assert len(sizes) == 1


def test_the_cache_is_bounded_by_bytes(small: GrammarCompiler) -> None:
    """The least recently used grammar is evicted first; the newest always stays."""
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
    """The kernel enforces the limits, other grammars still compile, and the refusal is remembered.

    No process keeps the memory that a refused grammar took.
    """
    before = compiling()
    with pytest.raises(InvalidArgument, match="CPU time"):
        small.submit(SLOW).result()
    limits = small.limits
    small.limits = replace(limits, cpu_s=60, compile_bytes=8 << 20)
    with pytest.raises(InvalidArgument, match="8 MiB of memory"):
        small.submit(Spec(SLOW.kind, SLOW.text + " ")).result()
    small.limits = limits
    assert small.submit(Spec("regex", "a+")).result() > 0
    assert all(process.memory_info().rss < 180 << 20 for process in compiling() - before)
    started = time.perf_counter()
    with pytest.raises(InvalidArgument, match="CPU time"):
        small.submit(SLOW).result()
    assert time.perf_counter() - started < 0.1


def test_timeouts_and_kills_are_not_remembered(small: GrammarCompiler) -> None:
    """A wall-clock timeout and a kill are reported as such, and the next request compiles again."""
    before = compiling()
    small.submit(Spec("regex", "a")).result()
    only(compiling() - before).suspend()
    limits = small.limits
    small.limits = replace(limits, cpu_s=0.05)
    with pytest.raises(Overloaded, match="busy"):
        small.submit(Spec("regex", "b")).result()
    small.limits = replace(limits, cpu_s=100)
    small.submit(Spec("regex", "b")).result()
    process = only(compiling() - before)
    started = process.cpu_times().user
    future = small.submit(SLOW)
    while process.cpu_times().user < started + 0.1:
        os.sched_yield()
    process.send_signal(signal.SIGKILL)
    with pytest.raises(Unavailable, match="signal 9; retry"):
        future.result()
    small.limits = limits
    with pytest.raises(InvalidArgument, match="CPU time"):
        small.submit(SLOW).result()


@pytest.mark.parametrize(
    "pattern",
    ["(.?){3000}", r"(((\w* ?)*)*(\w* ?)*)*", r"(((\w+ ?)+,?)+;?)+", r"(\w+\s?){1,20}", "(a|b)*a(a|b){20}"],
)
def test_ambiguous_expressions_are_cheap(pattern: str) -> None:
    """They compile in a fraction of a second, and their masks delay no step."""
    for spec in (
        Spec("regex", pattern),
        Spec("json_schema", json.dumps({"type": "string", "pattern": f"^{pattern}$"})),
    ):
        started = time.thread_time()
        matcher, rows = matcher_of(spec), Masks(1, VOCAB, torch.device("cpu")).rows
        for token in tokenizer().encode('"aaab aab' if spec.kind == "json_schema" else "aaab aab").ids:
            matcher.fill_mask(rows, 0)
            matcher.accept(token)
        assert time.thread_time() - started < 0.5


def test_grammars_beyond_the_engines_limits_are_refused() -> None:
    """The worker would build their masks between two steps of the batch."""
    slow = Spec("grammar", "root ::= " + "[a-z]* " * 2000)
    with pytest.raises(InvalidArgument, match="cannot be compiled"):
        compiler().submit(slow).result()


@pytest.mark.parametrize(
    "spec",
    [
        Spec("json_schema", json.dumps({"type": "object", "properties": {
            f"p{i}": {"type": "string", "minLength": i, "maxLength": i + 1000} for i in range(3000)
        }})),
        Spec("regex", r"\p{L}{1,900}" * 20),
        Spec("regex", "(a*)*" * 2000 + "b"),
        Spec("regex", "".join(f"(?=.*{c}.{{0,200}}x)" for c in "abcdefgh") + ".*"),
    ],
    ids=["properties", "letters", "stars", "lookaheads"],
)  # fmt: skip
def test_a_grammar_that_uses_up_the_compiler_is_refused(spec: Spec) -> None:
    """The process may die of it, as of a stack used up; no later request compiles it again."""
    with pytest.raises(InvalidArgument, match=f"the {spec.kind} cannot be compiled"):
        compiler().submit(spec).result()
    before = compiling()
    with pytest.raises(InvalidArgument, match=f"the {spec.kind} cannot be compiled"):
        compiler().submit(spec).result()
    assert compiling() == before


@pytest.mark.parametrize("kind", ["regex", "grammar", "json_schema"])
def test_long_repetitions_in_a_row_compile(kind: Literal["regex", "grammar", "json_schema"]) -> None:
    count = "{1,1000}"
    text = {
        "regex": f"(a|b|c){count}" * 20,
        "grammar": "root ::=" + f' ("a" | "b" | "c"){count}' * 20,
        "json_schema": json.dumps({"type": "string", "pattern": "^" + f"(a|b|c){count}" * 20 + "$"}),
    }[kind]
    assert compiler().submit(Spec(kind, text)).result() > 0


def test_a_compiler_that_cannot_start_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing about the grammar, which the next request compiles."""
    made = GrammarCompiler(SMOLLM2, VOCAB, [END])
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        failed = made.submit(Spec("regex", "a+"))
        with pytest.raises(Unavailable, match="ended with status 1; retry"):
            failed.result()
    assert made.submit(Spec("regex", "a+")).result() > 0
    made.close()


def test_oversized_specs_are_refused_at_once(small: GrammarCompiler) -> None:
    before = compiling()
    future = small.submit(Spec("regex", "a" * 300_000))
    assert future.done()
    with pytest.raises(InvalidArgument, match="the limit is"):
        future.result()
    assert compiling() == before


def test_an_evicted_grammar_in_use_is_counted_and_found(small: GrammarCompiler) -> None:
    specs = [Spec("choice", json.dumps([f"{n}-{word}" for word in range(400)])) for n in range(30)]
    size = small.submit(specs[0]).result()
    matcher = matcher_of(specs[0], small)
    small.limits = replace(small.limits, cache_bytes=size * 3)
    for spec in specs[1:]:
        small.submit(spec).result()
    assert small.find(specs[0]) is not None
    assert size * 3 >= small.cached_bytes >= size
    assert small.find(specs[1]) is None
    del matcher


async def test_the_last_caller_to_leave_cancels_the_compilation() -> None:
    """This holds for running and queued compilations.

    The thread is free at once.
    """
    before = compiling()
    made = GrammarCompiler(SMOLLM2, VOCAB, [END], CompilerLimits(threads=1, cpu_s=100))
    try:
        await made.prepare(Spec("regex", "first"))
        process = only(compiling() - before)
        started = process.cpu_times().user
        running, joined = (asyncio.ensure_future(made.prepare(SLOW)) for _ in range(2))
        queued = [asyncio.ensure_future(made.prepare(Spec("regex", f"{n}x"))) for n in range(50)]
        while process.cpu_times().user < started + 0.1:
            await asyncio.sleep(0)
        exit_fd = os.pidfd_open(process.pid)
        for task in [running, *queued]:
            task.cancel()
        await asyncio.gather(running, *queued, return_exceptions=True)
        assert not select.select([exit_fd], [], [], 0.2)[0], "a caller still waits for it"
        joined.cancel()
        await asyncio.gather(joined, return_exceptions=True)
        assert select.select([exit_fd], [], [], 30)[0]
        os.close(exit_fd)
        assert await made.prepare(Spec("regex", "last")) > 0
        assert made.num_compiled == 2
    finally:
        made.close()


def test_refusals_from_the_child_reach_the_client(small: GrammarCompiler) -> None:
    for _ in range(2):
        with pytest.raises(InvalidArgument) as caught:
            small.submit(Spec("json_schema", '{"uniqueItems": true}')).result()
        assert caught.value.message.startswith("the JSON schema at $ has uniqueItems, which can")
        assert caught.value.param == "structured_output"


def test_a_dead_process_is_replaced(small: GrammarCompiler) -> None:
    before = compiling()
    small.submit(Spec("regex", "a")).result()
    process = only(compiling() - before)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert small.submit(Spec("regex", "b")).result() > 0


def test_processes_end_with_their_worker() -> None:
    code = f"""
import time
from pathlib import Path
from worker_svc.grammars.compiler import CompilerLimits, GrammarCompiler
from worker_svc.grammars.spec import Spec
GrammarCompiler(Path({str(SMOLLM2)!r}), {VOCAB}, [{END}]).submit(Spec("regex", "a")).result()
print(flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        lines = iter(worker.stdout.readline, b"\n")
        assert all(lines)
        children = psutil.Process(worker.pid).children()
        worker.kill()
    assert children
    assert not psutil.wait_procs(children, timeout=30)[1]


def test_grammars_need_a_vocabulary_and_an_end_token(tmp_path: object) -> None:
    assert can_constrain(SMOLLM2, [END])
    assert not can_constrain(SMOLLM2, [])
    assert not can_constrain(Path(str(tmp_path)), [END])


def test_padding_and_special_tokens_are_never_allowed() -> None:
    """Ids beyond the tokenizer's own and tokens such as <|im_start|> are masked."""
    made = GrammarCompiler(SMOLLM2, VOCAB + 100, [END])
    try:
        tokens = allowed(matcher_of(Spec("regex", "(.|\n)*"), made), VOCAB + 100)
        assert {END, tokenizer().encode("a").ids[0]} <= set(tokens)
        assert tokenizer().token_to_id("<|im_start|>") not in tokens
        assert max(tokens) < VOCAB
    finally:
        made.close()
