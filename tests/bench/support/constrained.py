"""The cost of constraints in a decode step, and what jump-ahead saves, for `tests.bench.kernels.sampling`.

The first part runs 32 requests in a batch, greedy and at temperature 1, with none, one or all of them under a
JSON schema. It measures the runner's decode step including sampling and matching, in alternating rounds, and
reports medians. The second part runs one request after the other, with forced tokens emitted at once or one
by one, and reports forward passes per output token.

`matching` measures the grammars' part alone, on the host, for the tokens of one answer: the time that delays
the next step, and the time to search for forced tokens, which passes while a GPU still computes the logits.

A GPU runs random weights, so its output follows no grammar. There one grammar accepts every token and another
rejects more than half.
"""

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from protos.steps import Prefill
from tests.support.sampling_params import constrained, sampling_params
from tests.support.worker.grammar_harness import (
    VOCAB,
    ConstrainedHarness,
    compiler,
    constraints,
    tokenizer,
)
from tests.support.worker.harness import Harness, tokens_of
from worker_svc.devices.base import Device
from worker_svc.grammars.compiler import CompilerLimits, GrammarCompiler
from worker_svc.grammars.constraints import Constraints
from worker_svc.grammars.spec import Spec
from worker_svc.vllm_adapter.model import VllmModel

BATCH: Final = 32
SCHEMA: Final = Spec("json_schema", json.dumps({
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 40, "maxItems": 50},
        "kind": {"enum": ["admin", "customer", "guest"]},
    },
    "required": ["name", "age", "tags", "kind"],
}))  # fmt: skip
"""Long enough that no request ends during a measurement."""
RECORD: Final = Spec("json_schema", json.dumps({
    "type": "object",
    "properties": {"status": {"enum": ["succeeded", "failed"]}, "confidence": {"type": "integer", "minimum": 0, "maximum": 9},
                   "explanation": {"type": "string", "maxLength": 20}},
    "required": ["status", "confidence", "explanation"],
}))  # fmt: skip
ANSWER: Final = json.dumps({
    "name": "Maria Sanchez",
    "age": 41,
    "tags": ["customer", "vip", "early adopter", "newsletter", "spanish", "returns often", "mobile app", "gold"] * 5,
    "kind": "customer",
})  # fmt: skip
"""A text under `SCHEMA`."""
FAST_STEP_US: Final = 1500
"""A GPU's step, which matching must not delay by more than 5 %."""
_PROMPT: Final = "A customer in JSON:\n"
# Grammars over the tokens of the random model, which are w0, w1, …
WORDS: Final = Spec("regex", "(w[0-9]+)*")
EVEN_WORDS: Final = Spec("regex", "(w[02468][0-9]*)*")


@dataclass(frozen=True)
class Case:
    """A batch to measure."""

    name: str
    """Name in the report."""
    constrained: int
    """Number of constrained requests."""
    temperature: float
    """Temperature of all requests."""


CASES: Final = (
    Case("plain greedy", 0, 0.0),
    Case("1 constrained, greedy", 1, 0.0),
    Case("32 constrained, greedy", BATCH, 0.0),
    Case("plain sampled", 0, 1.0),
    Case("32 constrained, sampled", BATCH, 1.0),
)


def step_times(harness: Harness, case: Case, steps: int, prompt: Sequence[int], grammar: Spec) -> list[float]:
    """Prefills a batch, measures its decode steps in seconds and frees it."""
    for slot in range(BATCH):
        sampling = sampling_params(temperature=case.temperature, seed=slot)
        if slot < case.constrained:
            sampling = constrained(sampling, grammar.kind, grammar.text)
        admission = harness.admit(slot, prompt, sampling, num_prompt_tokens=len(prompt))
        harness.run(admit=[admission], work=Prefill(slot, 0, len(prompt), sample=True))
        harness.lengths[slot] = len(prompt)
    slots = range(BATCH)
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        outputs = harness.decode(slots)
        times.append(time.perf_counter() - started)
        assert all(len(output.token_ids) == 1 for output in outputs), [output.error for output in outputs]
        assert len(tokens_of(outputs)) == BATCH
    harness.release(slots)
    return times


def step_cost(harness: ConstrainedHarness, *, quick: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the milliseconds of a step by case, and the ratios to steps without constraints."""
    compiler().submit(SCHEMA).result()
    prompt = tokenizer().encode(_PROMPT).ids
    steps, turns = (12, 2) if quick else (48, 5)
    times: dict[str, list[float]] = {case.name: [] for case in CASES}
    for turn in range(turns):
        for case in CASES if turn % 2 == 0 else reversed(CASES):
            times[case.name] += step_times(harness, case, steps, prompt, SCHEMA)[2:]
    ms = {name: statistics.median(values) * 1000 for name, values in times.items()}
    return ms, {
        "constrained_b1": ms["1 constrained, greedy"] / ms["plain greedy"],
        "constrained_b32": ms["32 constrained, greedy"] / ms["plain greedy"],
        "constrained_sampled_b32": ms["32 constrained, sampled"] / ms["plain sampled"],
    }


def matching(*, quick: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the microseconds of matching 32 rows in a step, and their ratio to a fast step.

    Each row follows `ANSWER`, from another of its tokens on.
    """
    answer = tokenizer().encode(ANSWER).ids
    compiler().submit(SCHEMA).result()
    logits = torch.empty(BATCH, VOCAB)
    before, after = list[float](), list[float]()
    for _ in range(2 if quick else 20):
        matched = constraints(num_slots=BATCH)
        for slot in range(BATCH):
            matched.admit(slot, SCHEMA, answer[:slot])
        for step in range(len(answer) - BATCH):
            tokens, drawn_at = answer[step : step + BATCH], list[float]()

            def draw(_: Sequence[int] | None, tokens: list[int] = tokens) -> torch.Tensor:
                drawn = torch.tensor(tokens)
                drawn_at.append(time.perf_counter())  # noqa: B023 - called in this round only
                return drawn

            started = time.perf_counter()
            choice = matched.choose(
                range(BATCH), logits, draw, masked_first=[False] * BATCH, room=[64] * BATCH
            )
            ended = time.perf_counter()
            assert choice.values == tokens, choice.errors
            before.append(drawn_at[0] - started)
            after.append(ended - drawn_at[0])
    search_us, matching_us = (statistics.median(times) * 1e6 for times in (before, after))
    figures = {"matching_us": round(matching_us, 1), "search_us": round(search_us, 1)}
    return figures, {"matching_of_fast_step": matching_us / FAST_STEP_US}


def passes_per_token(harness: ConstrainedHarness, spec: Spec, *, quick: bool) -> float:
    """Returns the forward passes per output token of requests that run one after the other."""
    tokens = passes = 0
    for seed in range(4 if quick else 16):
        before = harness.num_chunks + harness.num_decodes
        ((output, error),) = harness.generate_constrained(
            [_PROMPT], [spec], [sampling_params(temperature=1.0, seed=seed)], 120
        )
        assert error is None
        tokens += len(output)
        passes += harness.num_chunks + harness.num_decodes - before
    return passes / tokens


def measured(*, quick: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Runs both parts on SmolLM2; returns figures and ratios."""
    harness = ConstrainedHarness(min_jump=0)
    ms, ratios = step_cost(harness, quick=quick)
    matched, matching_ratios = matching(quick=quick)
    figures = {
        **{name: round(value, 2) for name, value in ms.items()},
        **matched,
        "redrawn": harness.constraints.num_redrawn,
    }
    for least in (0, 4, 1):
        harness.constraints._min_jump = least
        figures[f"passes_per_token_jump_{least}"] = round(passes_per_token(harness, RECORD, quick=quick), 4)
    return figures, ratios | matching_ratios


def measured_on_words(
    model: VllmModel, device: Device, folder: Path, *, quick: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Measures the random model.

    `words` runs under a grammar that accepts all tokens, `even words` under one that rejects more than half.
    """
    vocab, ends = model.description.vocab_size, model.description.eos_token_ids
    grammars = GrammarCompiler(folder, vocab, ends, CompilerLimits())
    constraints = Constraints(
        grammars, num_slots=BATCH, max_rows=BATCH, vocab_size=vocab, end_ids=ends, device=device.torch_device, min_jump=0
    )  # fmt: skip
    harness = Harness(
        model, max_model_len=1024, max_num_seqs=BATCH, decode_buckets=(BATCH,), device=device, constraints=constraints
    )  # fmt: skip
    kinds = {"plain": (0, WORDS), "words": (BATCH, WORDS), "even words": (BATCH, EVEN_WORDS)}
    for spec in (WORDS, EVEN_WORDS):
        grammars.submit(spec).result()
    steps, turns = (12, 2) if quick else (48, 5)
    times: dict[str, list[float]] = {}
    redrawn: dict[str, int] = {}
    for turn in range(turns * 2):
        drawn = "greedy" if turn % 2 else "sampled"
        for kind, (count, spec) in kinds.items():
            name = f"{kind}, {drawn}"
            before = constraints.num_redrawn
            case = Case(name, count, float(drawn == "sampled"))
            times.setdefault(name, []).extend(step_times(harness, case, steps, range(100, 164), spec)[2:])
            redrawn[name] = redrawn.get(name, 0) + constraints.num_redrawn - before
    ms = {name: statistics.median(values) * 1000 for name, values in times.items()}
    figures = {name: round(value, 3) for name, value in ms.items()}
    figures |= {f"redrawn a step, {name}": round(count / turns / steps, 1) for name, count in redrawn.items()}
    ratios = {
        f"{kind.replace(' ', '_')}_{drawn}_b{BATCH}": ms[f"{kind}, {drawn}"] / ms[f"plain, {drawn}"]
        for kind in ("words", "even words")
        for drawn in ("greedy", "sampled")
    }
    return figures, ratios
