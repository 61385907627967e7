"""Runs a model on the device as it would be served, and compares it with transformers on this host's CPU.

A scheduler and a worker run in this process. transformers computes all log-probabilities of an answer in one
forward pass in float32: if every token of the answer is the likeliest, greedy generation yields the answer by
induction. A second pass in the device's type shows the effect of rounding on this model and prompt.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from deploy.checks.check_results import CheckFailed, Note, Report
from protos.errors import ConfigurationRefused
from protos.service.logs import get_logger
from protos.steps import Decode, StepResult
from protos.triptych.v1 import common_pb2
from scheduler_svc.engine.placement import AttachedReplica
from scheduler_svc.requests.admission import Submission
from scheduler_svc.requests.request import Event
from scheduler_svc.requests.sampling import Sampling
from scheduler_svc.settings import Settings as SchedulerSettings
from scheduler_svc.shapes.batch_histogram import BatchHistogram
from scheduler_svc.workers.descriptions import configured_description, description_from_proto
from scheduler_svc.workers.replicas import GeneratingReplicas, make_engine
from worker_svc.api.convert import description_to_proto, ready_to_proto, shapes_from_proto
from worker_svc.execution.worker import Worker
from worker_svc.settings import Settings

_BUCKETS = (1, 2, 4)
_CHUNK = 128
_STEPS = 12
"""Tokens of each answer."""
_REPORTED = 5
"""Likeliest tokens that each step reports, and whose log-probabilities show the effect of rounding."""
# Log-probabilities may differ by this many nats, and by this many times the effect of the device's type.
_NATS = 0.02
_TIMES_ROUNDING = 4.0
_ADVICE = "try --dtype float32, -O 0 and another RBLN_USE_CUSTOM_KERNEL, and report the changes"


def check(settings: Settings, report: Report, computed: torch.dtype | None) -> None:
    """Runs the model of the settings, or a small made-up model, and reports a result for each use of it.

    `computed` is the type in which the device computes float32; `None` for float32.
    """
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="triptych-parity-") as folder:
        runs: list[_Parity] = []

        def start() -> str:
            started = time.monotonic()
            runs.append(_Parity(settings, Path(folder), computed))
            return f"{settings.model or 'made up'}, ready after {time.monotonic() - started:.1f} s"

        if report.check("model", start, needs=("attention",)) != "ok":
            return
        run = runs[0]
        report.check("reference", run.open_reference)
        report.check("prefill", run.prefill, needs=("reference",))
        for bucket in _BUCKETS:
            name = f"decode, {bucket} row{'s' if bucket > 1 else ''}"
            report.check(name, partial(run.decode, bucket), needs=("reference",))
        report.check("prefix hits", run.prefix_hits, needs=("prefill",))
        run.worker.close()


@dataclass
class Answer:
    """One generated sequence, and the `Sink` of its request."""

    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    """Of each token."""
    num_cached: int = 0
    """Prompt tokens whose keys and values were reused."""

    def push(self, event: Event) -> None:
        """Takes an event; raises the request's error."""
        if event.error is not None:
            raise event.error
        self.tokens += event.token_ids
        self.logprobs += event.logprobs
        if event.first:
            self.num_cached = event.num_cached_tokens

    def push_tokens(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> None:
        """Is not called: every token has log-probabilities."""


class Reference:
    """The same model in transformers, in float32 and in the type in which the device computes."""

    def __init__(self, folder: Path, dtype: torch.dtype, *, trust_remote_code: bool) -> None:
        """Loads the model."""

        def load(kind: torch.dtype) -> Any:
            return AutoModelForCausalLM.from_pretrained(
                folder, dtype=kind, trust_remote_code=trust_remote_code
            ).eval()

        self._model = load(torch.float32)
        self._in_dtype = None if dtype == torch.float32 else load(dtype)
        # The largest difference between the two so far, in nats.
        self._rounded = 0.0

    def compare(self, answers: Sequence[Answer]) -> str:
        """Returns the difference of greedy answers from the reference; `CheckFailed` if it is too large."""
        worst = 0.0
        expected = [self._expected(answer) for answer in answers]
        tolerance = _NATS + _TIMES_ROUNDING * self._rounded
        for answer, rows in zip(answers, expected, strict=True):
            steps = zip(rows, answer.tokens, answer.logprobs, strict=True)
            for step, (row, token, entry) in enumerate(steps):
                gap = float(row.max() - row[token])
                reported = torch.tensor([*entry.top_logprobs, entry.logprob])
                off = float((row[[*entry.top_token_ids, token]] - reported).abs().max())
                if not (gap <= tolerance and off <= tolerance):  # also catches NaN
                    raise CheckFailed(
                        f"step {step} after a prompt of {len(answer.prompt)} tokens: token {token} is {gap:.2g} nats"
                        f" below the reference's {int(row.argmax())}, and log-probabilities are {off:.2g} off;"
                        f" {_ADVICE}"
                    )
                worst = max(worst, off)
        rounding = f"; rounding alone gives {self._rounded:.2g}" if self._rounded else ""
        return f"greedy tokens agree, log-probabilities within {worst:.2g}{rounding}"

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
    """A model on the device, and its reference."""

    def __init__(self, settings: Settings, folder: Path, computed: torch.dtype | None) -> None:
        """Starts the model; a made-up model is written to `folder`."""
        self._settings, self._computed = settings, computed
        if not settings.model:
            dtype = "float32" if settings.dtype == "auto" else settings.dtype  # auto would be half precision
            settings = settings.model_copy(update={"model": str(_make_up(folder)), "dtype": dtype})
        self.worker = worker = Worker(settings)
        worker.prepare()
        self._block = block = worker.device.default_block_size
        self._longest = longest = min(worker.description.max_model_len, max(2 * block, 4 * _CHUNK))
        shapes = SchedulerSettings(
            max_num_seqs=_BUCKETS[-1], max_num_batched_tokens=_CHUNK, max_model_len=longest, block_size=block,
            # Enough for every prompt below, and little compared with the weights.
            num_blocks=None if settings.kv_memory_on(worker.device.name) else 1 + 8 * -(-longest // block),
            lease_steps=1,
        )  # fmt: skip
        self._configure(shapes)
        self._num_steps: Counter[int] = Counter()
        self._reference: Reference

    def _configure(self, shapes: SchedulerSettings) -> None:
        """Loads the weights, makes graphs and attaches a scheduler."""
        worker = self.worker
        description = description_from_proto(description_to_proto(worker, worker_id="local", model=""))
        if description.model.pool_tasks:
            raise ConfigurationRefused(
                f"{description.model.architecture} generates no tokens to compare; choose another --model"
            )
        self._engine = make_engine(shapes)
        histogram = BatchHistogram(None, None, time.monotonic, get_logger())
        setup = GeneratingReplicas(shapes, self._engine, histogram, time.monotonic).set_up("", description)
        configured = worker.configure(shapes_from_proto(setup.request), lambda *_: None)
        ready = ready_to_proto(configured, 0.0).ready
        description = configured_description(description, [ready])
        self._copies_blocks = description.copies_blocks
        connect = partial(AttachedReplica, wake=lambda: None)
        memory = setup.make_memory(description, tuple(ready.num_blocks))
        self._scheduler = setup.attach(description, memory, "", connect)

    def _generate(self, prompts: Sequence[Sequence[int]], num_tokens: int = _STEPS) -> list[Answer]:
        """Answers all prompts greedily at the same time."""
        params = common_pb2.SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=_REPORTED
        )
        answers = list(map(Answer, prompts))
        for answer in answers:
            request = Submission(str(id(answer)), tuple(answer.prompt), Sampling(params))
            self._engine.submit(request, answer)
        self._engine.dispatch()
        while (plan := self._scheduler.next_plan()) is not None:
            if isinstance(plan.work, Decode):
                self._num_steps[plan.work.bucket] += 1
            outputs, num_steps = self.worker.execute(plan), int(plan.work is not None)
            self._scheduler.update(StepResult(plan.step, outputs=outputs, num_steps=num_steps))
            self._engine.dispatch()
        return answers

    def open_reference(self) -> str:
        """Loads the model with transformers."""
        worker, trust = self.worker, self._settings.trust_remote_code
        types = (worker.description.dtype, self._computed or torch.float32)
        dtype = max(types, key=lambda each: torch.finfo(each).eps)
        self._reference = Reference(worker.folder, dtype, trust_remote_code=trust)
        return "transformers, in float32 on this host"

    def prefill(self) -> str:
        """Prefills prompts below and above a chunk, and a prompt longer than a block if it fits."""
        lengths = [5, _CHUNK, 2 * _CHUNK + 44, self._block + _CHUNK + 7]
        fitting = [length for length in lengths if length <= self._longest - _STEPS]
        prompts = [self._prompt(length, seed) for seed, length in enumerate(fitting)]
        compared = self._reference.compare(self._generate(prompts, 1))
        return f"prompts of up to {max(fitting)} tokens; {compared}"

    def decode(self, bucket: int) -> str:
        """Decodes with all rows of a bucket."""
        prompts = [self._prompt(9 + 31 * row, 10 * bucket + row) for row in range(bucket)]
        before = self._num_steps[bucket]
        compared = self._reference.compare(self._generate(prompts))
        steps = self._num_steps[bucket] - before
        if not steps:
            raise CheckFailed(f"no step ran in the bucket of {bucket}; report this")
        return f"{steps} steps; {compared}"

    def prefix_hits(self) -> str:
        """Sends prompts with a common prefix in sequence."""
        first = self._prompt(2 * _CHUNK + 44, 77)
        prompts = [first, [*first[:200], *self._prompt(20, 78)], [*first[:290], *self._prompt(9, 79)]]
        reusing = [self._generate([prompt])[0] for prompt in prompts]
        compared = self._reference.compare(reusing)
        tokens = sum(answer.num_cached for answer in reusing)
        if not tokens:
            if self._copies_blocks:
                raise CheckFailed("a prompt that begins like an earlier prompt reused nothing; report this")
            raise Note(f"nothing was reused, because the worker cannot copy blocks; {compared}")
        windows = ", windows included" if any(group.window for group in self.worker.groups) else ""
        return f"{tokens} tokens reused{windows}; {compared}"

    def _prompt(self, length: int, seed: int) -> list[int]:
        """Returns arbitrary tokens; the first ids are often special."""
        size = self.worker.description.vocab_size - 10
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
