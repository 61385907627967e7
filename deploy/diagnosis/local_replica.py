"""A scheduler and a worker in this process, without services around them."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from protos.errors import ConfigurationRefused
from protos.logs import get_logger
from protos.steps import Decode, StepPlan, StepResult
from protos.triptych.v1 import common_pb2
from scheduler_svc.convert.model import copies_blocks_from_proto, description_from_proto
from scheduler_svc.requests.admission import Submission
from scheduler_svc.requests.request import Event
from scheduler_svc.requests.sampling import Sampling
from scheduler_svc.settings import Settings
from scheduler_svc.shapes.batch_histogram import BatchHistogram
from scheduler_svc.workers.engine_protocol import WorkerLink
from scheduler_svc.workers.generating import GeneratingReplicas, make_engine
from worker_svc.api.convert import description_to_proto, geometry_from_proto, ready_to_proto
from worker_svc.execution.worker import Worker


@dataclass
class Answer:
    """One generated sequence."""

    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    """One entry for each token."""
    num_cached: int = 0
    """Prompt tokens whose keys and values were reused."""


class LocalReplica:
    """A prepared worker and the scheduler that drives it, one step at a time."""

    def __init__(self, worker: Worker, settings: Settings, model: str, *, logprobs: int) -> None:
        """Configures the worker, which loads the weights and makes graphs.

        Args:
            worker: prepared.
            settings: the scheduler's.
            model: the worker's `--model`.
            logprobs: how many of the likeliest tokens each step reports.

        Raises:
            ConfigurationRefused: if the model does not generate, or does not run with these settings.
        """
        self._worker = worker
        description = description_from_proto(description_to_proto(worker, worker_id="local", model=model))
        if description.model.pool_tasks:
            raise ConfigurationRefused(
                f"{description.model.architecture} generates no tokens to compare; choose another --model"
            )
        engine = make_engine(settings)
        histogram = BatchHistogram(None, None, time.monotonic, get_logger())
        setup = GeneratingReplicas(settings, engine, histogram, time.monotonic).set_up("local", description)
        configured = worker.configure(geometry_from_proto(setup.request), lambda *_: None)
        ready = ready_to_proto(configured, 0.0).ready
        self.copies_blocks = copies_blocks_from_proto(ready.block_copies)
        """Whether the worker copies blocks."""
        description = replace(description, copies_blocks=self.copies_blocks)
        link = WorkerLink(
            lambda: None, lambda *_: None, lambda _: None, lambda *_: None, lambda _: None, lambda: False
        )
        self._scheduler = setup.attach(description, tuple(ready.num_blocks), model, link)
        self._engine = engine
        self._logprobs = logprobs
        self._count = 0
        self.num_steps: Counter[int] = Counter()
        """Decode steps so far, by bucket."""

    @property
    def num_forks(self) -> int:
        """Sequences so far that went on from the prompt of another one."""
        return self._engine.replicas["local"].scheduler.stats.forks

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, *, n: int = 1, salt: str = ""
    ) -> list[Answer]:
        """Answers prompts greedily, all at the same time.

        Args:
            prompts: token ids.
            num_tokens: tokens of each answer.
            n: sequences for each prompt.
            salt: requests with different salts share no prefix.

        Returns:
            `n` answers for each prompt, in order.

        Raises:
            TriptychError: if a request fails.
        """
        params = common_pb2.SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=self._logprobs
        )
        answers: list[Answer] = []
        for prompt in prompts:
            sink = _Answers([Answer(prompt) for _ in range(n)])
            self._count += 1
            submission = Submission(f"r{self._count}", tuple(prompt), Sampling(params), n=n, cache_salt=salt)
            self._engine.submit(submission, sink)
            answers += sink.answers
        while self._step():
            pass
        return answers

    def _step(self) -> bool:
        """Runs one step; returns False if there is nothing to do."""
        self._engine.dispatch()
        plan: StepPlan | None = self._scheduler.step()
        if plan is None:
            return False
        if isinstance(plan.work, Decode):
            self.num_steps[plan.work.bucket] += 1
        self._scheduler.update(StepResult(plan.step, outputs=self._worker.execute(plan)))
        return True


class _Answers:
    """Collects the sequences of one request; a `Sink`."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.answers = answers

    def push(self, event: Event) -> None:
        """Takes one event; raises the request's error."""
        if event.error is not None:
            raise event.error
        answer = self.answers[event.sequence]
        answer.tokens += event.token_ids
        answer.logprobs += event.logprobs
        if event.first:
            for each in self.answers:
                each.num_cached = event.num_cached_tokens

    def push_tokens(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> None:
        """Is not called: every token has log-probabilities."""
        raise NotImplementedError
