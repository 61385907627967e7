"""Constrained generation without services: a SmolLM2 runner for requests with grammars."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import tokenizers
import torch

from protos.errors import TriptychError
from protos.steps import Decode, Prefill, SlotOutput
from protos.triptych.v1 import common_pb2
from tests.support.sampling_params import constrained
from tests.support.worker.harness import Harness, load
from worker_svc.grammars.compiler import CompilerLimits, GrammarCompiler
from worker_svc.grammars.constraints import Constraints, Masks
from worker_svc.grammars.matcher import Grammar, Matcher
from worker_svc.grammars.spec import Spec
from worker_svc.model_files.loader import default_cache_dir
from worker_svc.vllm_adapter.configuration import Dtype

SMOLLM2 = default_cache_dir() / "smollm2"
VOCAB, END = 49152, 2

needs_smollm2 = pytest.mark.skipif(not SMOLLM2.is_dir(), reason="SmolLM2 is not fetched; run make models")


@cache
def compiler() -> GrammarCompiler:
    """Returns a compiler for SmolLM2 that all tests of the process share."""
    return GrammarCompiler(SMOLLM2, VOCAB, [END], CompilerLimits(cpu_s=10))


@cache
def tokenizer() -> tokenizers.Tokenizer:
    """Returns SmolLM2's tokenizer."""
    return tokenizers.Tokenizer.from_file(str(SMOLLM2 / "tokenizer.json"))


def grammar_of(spec: Spec, by: GrammarCompiler | None = None) -> Grammar:
    """Compiles a grammar, with SmolLM2's compiler or another."""
    by = by or compiler()
    by.submit(spec).result()
    grammar = by.find(spec)
    assert grammar is not None
    return grammar


def matcher_of(spec: Spec, by: GrammarCompiler | None = None) -> Matcher:
    """Returns a matcher at the start of a grammar."""
    return Matcher(grammar_of(spec, by), [END], [])


def allowed(matcher: Matcher, vocab_size: int = VOCAB) -> list[int]:
    """Returns the tokens that may come next, ascending."""
    rows = Masks(1, vocab_size, torch.device("cpu")).rows
    matcher.fill_mask(rows, 0)
    bits = np.unpackbits(rows[0].numpy().view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


def text_of(tokens: Sequence[int]) -> str:
    """Decodes output as a client reads it, without the end token."""
    return str(tokenizer().decode([token for token in tokens if token != END], skip_special_tokens=False))


def constraints(*, num_slots: int = 32, min_jump: int = 4) -> Constraints:
    """Returns constraints for SmolLM2 on the CPU."""
    return Constraints(
        compiler(),
        num_slots=num_slots,
        max_rows=num_slots,
        vocab_size=VOCAB,
        end_ids=[END],
        device=torch.device("cpu"),
        min_jump=min_jump,
    )


class ConstrainedHarness(Harness):
    """A harness for requests with grammars. It prefills forced tokens as the scheduler does."""

    def __init__(self, *, dtype: Dtype = "bfloat16", min_jump: int = 4, **options: object) -> None:
        model = load(SMOLLM2, dtype)
        self.constraints = constraints(min_jump=min_jump)
        super().__init__(model, max_model_len=1024, constraints=self.constraints, **options)  # type: ignore[arg-type]
        self.num_chunks = self.num_decodes = 0

    def generate_constrained(
        self,
        prompts: Sequence[str],
        specs: Sequence[Spec | None],
        sampling: Sequence[common_pb2.SamplingParams],
        max_tokens: int,
    ) -> list[tuple[list[int], TriptychError | None]]:
        """Returns each request's output, up to its end token or `max_tokens`, and its error, if it failed."""
        count = len(prompts)
        assert count <= self.shapes.max_num_seqs
        for spec in specs:
            if spec is not None:
                compiler().submit(spec).result()
        outputs: list[list[int]] = [[] for _ in range(count)]
        errors: list[TriptychError | None] = [None] * count
        pending: dict[int, int] = {}
        """Output tokens without KV, by running slot."""

        def collect(results: Sequence[SlotOutput]) -> None:
            for result in results:
                slot = result.slot
                if result.error is not None:
                    errors[slot] = result.error
                outputs[slot] += result.token_ids
                pending[slot] = len(result.token_ids)
                done = result.error is not None or END in result.token_ids or len(outputs[slot]) >= max_tokens
                if done:
                    del pending[slot]
                    outputs[slot] = outputs[slot][:max_tokens]

        for slot, (prompt, spec) in enumerate(zip(prompts, specs, strict=True)):
            ids = tokenizer().encode(prompt).ids
            params = constrained(sampling[slot], spec.kind, spec.text) if spec else sampling[slot]
            admission = self.admit(slot, ids, params, num_prompt_tokens=len(ids))
            assert len(ids) <= self.shapes.chunk
            self.num_chunks += 1
            collect(self.run(admit=[admission], work=Prefill(slot, 0, len(ids), sample=True)))
            self.lengths[slot] = len(ids)
        while pending:
            jumped = [slot for slot, count in pending.items() if count > 1]
            if jumped:
                slot = jumped[0]
                start, length = self.lengths[slot], pending[slot]
                assert length <= self.shapes.chunk
                self.num_chunks += 1
                self.lengths[slot] += length
                collect(self.run(work=Prefill(slot, start, length, sample=True)))
                continue
            slots = sorted(pending)
            self.num_decodes += 1
            bucket = next(size for size in self.shapes.decode_buckets if size >= len(slots))
            for slot in slots:
                self.lengths[slot] += 1
            collect(self.run(work=Decode(slots, bucket)))
        self.release(range(count))
        return list(zip(outputs, errors, strict=True))
