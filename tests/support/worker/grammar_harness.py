"""Constrained generation without a stack: a runner on SmolLM2 whose requests have grammars."""

from collections.abc import Sequence
from functools import cache

import tokenizers
import torch

from protos.errors import TriptychError
from protos.steps import Decode, Prefill, SlotOutput
from protos.triptych.v1 import common_pb2
from tests.support.sampling_params import constrained
from tests.support.worker.harness import Harness, load
from worker_svc.grammars.compiler import GrammarCompiler
from worker_svc.grammars.compiler_limits import CompilerLimits
from worker_svc.grammars.constraints import Constraints
from worker_svc.grammars.spec import Spec
from worker_svc.model_files.demo_models import default_cache_dir

SMOLLM2 = default_cache_dir() / "smollm2"
VOCAB, END = 49152, 2


@cache
def compiler() -> GrammarCompiler:
    """One process for all tests of a module's process."""
    return GrammarCompiler(SMOLLM2, VOCAB, [END], CompilerLimits(cpu_s=10))


@cache
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(SMOLLM2 / "tokenizer.json"))


def text_of(tokens: Sequence[int]) -> str:
    """What a client reads: without the end token."""
    return str(tokenizer().decode([token for token in tokens if token != END], skip_special_tokens=False))


def constraints(*, num_slots: int = 32, min_jump: int = 4) -> Constraints:
    return Constraints(
        compiler(),
        num_slots=num_slots,
        max_rows=num_slots,
        vocab_size=VOCAB,
        end_ids=[END],
        device=torch.device("cpu"),
        min_jump=min_jump,
    )


class Constrained(Harness):
    """A harness whose requests may have grammars; plays the scheduler's part of jump-ahead."""

    def __init__(self, *, min_jump: int = 4, **options: object) -> None:
        model = load(SMOLLM2, "bfloat16")
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
        """Output tokens of each request, up to its end token or ``max_tokens``, and why it failed, if it did."""
        count = len(prompts)
        assert count <= self.geometry.max_num_seqs
        for spec in specs:
            if spec is not None:
                compiler().submit(spec).result()
        outputs: list[list[int]] = [[] for _ in range(count)]
        errors: list[TriptychError | None] = [None] * count
        open_: dict[int, int] = {}
        """Of each slot that runs, its tokens that are not computed."""
        ended: list[int] = []

        def take(results: Sequence[SlotOutput]) -> None:
            for result in results:
                slot = result.slot
                if result.error is not None:
                    errors[slot] = result.error
                outputs[slot] += result.token_ids
                open_[slot] = len(result.token_ids)
                done = result.error is not None or END in result.token_ids or len(outputs[slot]) >= max_tokens
                if done:
                    del open_[slot]
                    ended.append(slot)
                    outputs[slot] = outputs[slot][:max_tokens]

        for slot, (prompt, spec) in enumerate(zip(prompts, specs, strict=True)):
            ids = tokenizer().encode(prompt).ids
            params = constrained(sampling[slot], spec.kind, spec.text) if spec else sampling[slot]
            admission = self.admit(slot, ids, params, num_prompt_tokens=len(ids))
            assert len(ids) <= self.geometry.chunk
            self.num_chunks += 1
            take(self.run(admit=[admission], work=Prefill(slot, 0, len(ids), sample=True)))
            self.lengths[slot] = len(ids)
        while open_:
            jumped = [slot for slot, left in open_.items() if left > 1]
            if jumped:
                slot = jumped[0]
                start, left = self.lengths[slot], open_[slot]
                assert left <= self.geometry.chunk
                self.num_chunks += 1
                self.lengths[slot] += left
                take(self.run(work=Prefill(slot, start, left, sample=True)))
                continue
            slots = sorted(open_)
            self.num_decodes += 1
            bucket = next(size for size in self.geometry.decode_buckets if size >= len(slots))
            positions = [self.lengths[slot] for slot in slots]
            for slot in slots:
                self.lengths[slot] += 1
            take(self.run(work=Decode(slots, positions, bucket)))
        self.release(range(count))
        return list(zip(outputs, errors, strict=True))
