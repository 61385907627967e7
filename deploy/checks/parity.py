"""Runs a model on the device as it would be served, and compares it with transformers on this host's CPU.

A scheduler and a worker run in this process. transformers computes all log-probabilities of an answer in one
forward pass in float32: if every token of the answer is the likeliest, greedy generation yields the answer by
induction. A second pass in the device's type shows the effect of rounding on this model and prompt.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from deploy.checks.check_results import CheckFailed, Note, Report
from protos.errors import ConfigurationRefused
from protos.logs import get_logger
from protos.steps import Decode, StepResult
from protos.triptych.v1 import common_pb2
from scheduler_svc.convert.model import copies_blocks_from_proto, description_from_proto
from scheduler_svc.requests.admission import Submission
from scheduler_svc.requests.request import Event
from scheduler_svc.requests.sampling import Sampling
from scheduler_svc.settings import Settings as SchedulerSettings
from scheduler_svc.shapes.batch_histogram import BatchHistogram
from scheduler_svc.workers.engine_protocol import WorkerLink
from scheduler_svc.workers.generating import GeneratingReplicas, make_engine
from worker_svc.api.convert import description_to_proto, geometry_from_proto, ready_to_proto
from worker_svc.execution.worker import Worker
from worker_svc.settings import Settings

_BUCKETS = (1, 2, 4)
_CHUNK = 128
_STEPS = 12
"""Tokens of each answer."""
_REPORTED = 5
"""Likeliest tokens that each step reports, and whose log-probabilities show the effect of rounding."""
# Log-probabilities may differ from those in float32 by this many nats, and by this many times the difference
# that the device's type alone makes.
_NATS = 0.02
_TIMES_ROUNDING = 4.0


def check(settings: Settings, report: Report) -> None:
    """Runs the model of the settings, or a small made-up model, and reports one result for each use of it."""
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="triptych-parity-") as folder:
        run = _Parity(settings, Path(folder))
        report.check("model", run.start, needs=("attention",))
        report.check("reference", run.open_reference, needs=("model",))
        report.check("prefill", run.prefill, needs=("reference",))
        for bucket in _BUCKETS:
            name = f"decode, {bucket} row{'s' if bucket > 1 else ''}"
            report.check(name, partial(run.decode, bucket), needs=("reference",))
        report.check("prefix hits", run.prefix_hits, needs=("prefill",))
        report.check("forks", run.forks, needs=("prefill",))
        run.close()


@dataclass
class Answer:
    """One generated sequence."""

    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    """Of each token."""
    num_cached: int = 0
    """Prompt tokens whose keys and values were reused."""


class _Answers:
    """Collects the sequences of one request; a `Sink`."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self._answers = answers

    def push(self, event: Event) -> None:
        """Takes one event; raises the request's error."""
        if event.error is not None:
            raise event.error
        answer = self._answers[event.sequence]
        answer.tokens += event.token_ids
        answer.logprobs += event.logprobs
        if event.first:
            for each in self._answers:
                each.num_cached = event.num_cached_tokens

    def push_tokens(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> None:
        """Is not called: every token has log-probabilities."""
        raise NotImplementedError


class _Replica:
    """A worker and its scheduler, one step at a time."""

    def __init__(self, worker: Worker, settings: SchedulerSettings, model: str) -> None:
        """Configures a prepared worker, which loads the weights and makes graphs."""
        self._worker = worker
        description = description_from_proto(description_to_proto(worker, worker_id="local", model=model))
        if description.model.pool_tasks:
            raise ConfigurationRefused(
                f"{description.model.architecture} generates no tokens to compare; choose another --model"
            )
        self._engine = make_engine(settings)
        histogram = BatchHistogram(None, None, time.monotonic, get_logger())
        replicas = GeneratingReplicas(settings, self._engine, histogram, time.monotonic)
        setup = replicas.set_up("local", description)
        ready = ready_to_proto(
            worker.configure(geometry_from_proto(setup.request), lambda *_: None), 0.0
        ).ready
        self.copies_blocks = copies_blocks_from_proto(ready.block_copies)
        link = WorkerLink(
            lambda: None, lambda *_: None, lambda _: None, lambda *_: None, lambda _: None, lambda: False
        )
        description = replace(description, copies_blocks=self.copies_blocks)
        self._scheduler = setup.attach(description, tuple(ready.num_blocks), model, link)
        self._count = 0
        self.num_steps: Counter[int] = Counter()
        """Decode steps so far, by bucket."""

    @property
    def num_forks(self) -> int:
        """Sequences so far that continued the prompt of another sequence."""
        return self._engine.replicas["local"].scheduler.stats.forks

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int = _STEPS, *, n: int = 1, salt: str = ""
    ) -> list[Answer]:
        """Answers all prompts greedily at the same time; requests with different salts share no prefix."""
        params = common_pb2.SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=_REPORTED
        )
        answers: list[Answer] = []
        for prompt in prompts:
            own = [Answer(prompt) for _ in range(n)]
            self._count += 1
            submission = Submission(f"r{self._count}", tuple(prompt), Sampling(params), n=n, cache_salt=salt)
            self._engine.submit(submission, _Answers(own))
            answers += own
        self._engine.dispatch()
        while (plan := self._scheduler.step()) is not None:
            if isinstance(plan.work, Decode):
                self.num_steps[plan.work.bucket] += 1
            self._scheduler.update(StepResult(plan.step, outputs=self._worker.execute(plan)))
            self._engine.dispatch()
        return answers


class Reference:
    """The same model in transformers, in float32 and in the device's type."""

    def __init__(self, folder: Path, dtype: torch.dtype, *, trust_remote_code: bool, advice: str) -> None:
        """Loads the model; `advice` ends the text of a failure."""

        def load(kind: torch.dtype) -> Any:
            return AutoModelForCausalLM.from_pretrained(
                folder, dtype=kind, trust_remote_code=trust_remote_code
            ).eval()

        self._model = load(torch.float32)
        self._in_dtype = None if dtype == torch.float32 else load(dtype)
        self._advice = advice
        # The largest difference between the two so far, in nats.
        self._rounded = 0.0
        self.name = type(self._model).__name__

    def compare(self, answers: Sequence[Answer]) -> str:
        """Returns the largest difference of greedy answers from the reference.

        Raises:
            CheckFailed: if it is too large.
        """
        worst, where, ties = 0.0, "", 0
        expected = [self._expected(answer) for answer in answers]
        tolerance = _NATS + _TIMES_ROUNDING * self._rounded
        for answer, rows in zip(answers, expected, strict=True):
            steps = zip(rows, answer.tokens, answer.logprobs, strict=True)
            for step, (row, token, entry) in enumerate(steps):
                gap = float(row.max() - row[token])
                ties += gap > 0
                reported = torch.tensor([*entry.top_logprobs, entry.logprob])
                off = float((row[[*entry.top_token_ids, token]] - reported).abs().max())
                place = f"step {step} after a prompt of {len(answer.prompt)} tokens"
                if not gap <= tolerance:  # also catches NaN
                    raise CheckFailed(
                        f"{place} chose token {token}, not the reference's {int(row.argmax())}, which is"
                        f" {gap:.2g} nats likelier; {self._advice}"
                    )
                if not off <= tolerance:
                    raise CheckFailed(
                        f"{place} has log-probabilities {off:.2g} off the reference's; {self._advice}"
                    )
                if off >= worst:
                    worst, where = off, place
        tied = f" ({ties} of them near ties)" if ties else ""
        rounding = f"; rounding alone gives {self._rounded:.2g}" if self._rounded else ""
        return f"greedy tokens agree{tied}, log-probabilities within {worst:.2g} ({where}{rounding})"

    def _expected(self, answer: Answer) -> torch.Tensor:
        """Returns the log-probabilities of float32, [tokens, vocab]."""
        expected = _logprobs(self._model, answer)
        if self._in_dtype is not None:
            changed = (_logprobs(self._in_dtype, answer) - expected).abs()
            likeliest = changed.gather(1, expected.topk(_REPORTED).indices)
            self._rounded = max(self._rounded, float(likeliest.max()))
        return expected


def _logprobs(model: Any, answer: Answer) -> torch.Tensor:
    tokens = torch.tensor([[*answer.prompt, *answer.tokens[:-1]]])
    with torch.inference_mode():
        result: torch.Tensor = model(tokens, logits_to_keep=len(answer.tokens)).logits[0].float()
        return result.log_softmax(dim=-1)


class _Parity:
    """One model on the device, and its reference."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings = settings
        self._folder = folder
        self._worker: Worker | None = None
        self._replica: _Replica
        self._reference: Reference

    def start(self) -> str:
        settings = self._settings
        if not settings.model:
            settings = settings.model_copy(update={"model": str(_make_up(self._folder))})
            if settings.dtype == "auto":  # which would be half precision
                settings = settings.model_copy(update={"dtype": "float32"})
        started = time.monotonic()
        self._worker = worker = Worker(settings)
        worker.prepare()
        block = worker.device.default_block_size
        longest = min(worker.description.max_model_len, max(2 * block, 4 * _CHUNK))
        shapes = SchedulerSettings(
            max_num_seqs=_BUCKETS[-1], max_num_batched_tokens=_CHUNK, max_model_len=longest, block_size=block,
            # Enough for every prompt below, and little compared with the weights.
            num_blocks=None if settings.kv_memory_on(worker.device.name) else 1 + 8 * -(-longest // block),
            lease_steps=1,
        )  # fmt: skip
        self._replica = _Replica(worker, shapes, settings.model)
        dtype = str(worker.description.dtype).removeprefix("torch.")
        model = self._settings.model or "a made-up model"
        return f"{model} in {dtype}, ready after {time.monotonic() - started:.1f} s"

    def open_reference(self) -> str:
        worker, settings = self._prepared, self._settings
        advice = "try --dtype float32 and -O 0, and report the changes"
        if worker.device.name == "rbln":
            other = 0 if settings.rbln_use_custom_kernel else 1
            advice = f"try RBLN_USE_CUSTOM_KERNEL={other} and --dtype float32, and report the changes"
        trust = settings.trust_remote_code
        self._reference = Reference(
            worker.folder, worker.description.dtype, trust_remote_code=trust, advice=advice
        )
        return f"{self._reference.name} of transformers, in float32 on this host"

    def prefill(self) -> str:
        """Prefills prompts below and above a chunk, and a prompt longer than a block if it fits."""
        worker = self._prepared
        room = worker.description.max_model_len - _STEPS
        lengths = [5, _CHUNK, 2 * _CHUNK + 44, worker.device.default_block_size + _CHUNK + 7]
        prompts = [self._prompt(length, seed) for seed, length in enumerate(lengths) if length <= room]
        compared = self._reference.compare(self._replica.generate(prompts, 1))
        chunks = sum(-(-len(prompt) // _CHUNK) for prompt in prompts)
        return f"prompts of up to {max(map(len, prompts))} tokens, {chunks} chunks; {compared}"

    def decode(self, bucket: int) -> str:
        """Decodes with all rows of a bucket."""
        prompts = [self._prompt(9 + 31 * row, 10 * bucket + row) for row in range(bucket)]
        before = self._replica.num_steps[bucket]
        compared = self._reference.compare(self._replica.generate(prompts))
        steps = self._replica.num_steps[bucket] - before
        if not steps:
            raise CheckFailed(f"no step ran in the bucket of {bucket}; report this")
        return f"{steps} steps; {compared}"

    def prefix_hits(self) -> str:
        """Sends prompts with a common prefix, then the same prompts without sharing."""
        first = self._prompt(2 * _CHUNK + 44, 77)
        prompts = [first, [*first[:200], *self._prompt(20, 78)], [*first[:290], *self._prompt(9, 79)]]
        reusing = [self._replica.generate([prompt])[0] for prompt in prompts]
        compared = self._reference.compare(reusing)
        tokens = sum(answer.num_cached for answer in reusing)
        if not tokens:
            if self._replica.copies_blocks:
                raise CheckFailed("a prompt that begins like an earlier prompt reused nothing; report this")
            raise Note(f"nothing was reused, because the worker cannot copy blocks; {compared}")
        plain = [self._replica.generate([each], salt=str(place))[0] for place, each in enumerate(prompts)]
        windows = ", windows included" if any(group.window for group in self._prepared.groups) else ""
        text = f"{tokens} tokens reused{windows}; {compared}"
        if [answer.logprobs for answer in plain] != [answer.logprobs for answer in reusing]:
            raise Note(f"{text}; a run without reuse rounds otherwise, so kernels do not repeat their bits")
        return f"{text}; to the last bit as without reuse"

    def forks(self) -> str:
        """Generates two sequences for one prompt, which is computed once if the worker copies blocks."""
        before = self._replica.num_forks
        compared = self._reference.compare(self._replica.generate([self._prompt(_CHUNK + 50, 99)], n=2))
        if self._replica.num_forks == before:
            if self._replica.copies_blocks:
                raise CheckFailed("the worker copies blocks, but no sequence was forked; report this")
            raise Note(f"every sequence computed its prompt: the worker cannot copy blocks; {compared}")
        return f"two sequences of one prompt; {compared}"

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    @property
    def _prepared(self) -> Worker:
        assert self._worker is not None
        return self._worker

    def _prompt(self, length: int, seed: int) -> list[int]:
        """Returns arbitrary tokens; the first ids are often special."""
        size = self._prepared.description.vocab_size - 10
        return [10 + (place * place * 31 + place * 17 + seed * 101) % size for place in range(length)]


def _make_up(folder: Path) -> Path:
    """Writes a small model with full attention, always with the same random weights."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, tie_word_embeddings=False,
        # Wide enough that every layer changes the result.
        initializer_range=0.1, dtype="float32",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder
