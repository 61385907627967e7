"""A scheduler and a worker's runner in one process, joined by protocol messages without gRPC."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from protos.step_messages import plan_from_proto, plan_to_proto, result_from_proto, result_to_proto
from protos.steps import GroupKind, StepPlan, StepResult
from protos.triptych.v1 import worker_pb2
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.placement import AttachedReplica
from scheduler_svc.kv.cache import CacheOptions, KvCache
from scheduler_svc.policy.order import ArrivalOrder
from scheduler_svc.policy.rules import Turns
from scheduler_svc.replica.scheduler import ReplicaScheduler
from scheduler_svc.requests.admission import ModelLimits, Submission
from scheduler_svc.requests.request import Sink
from scheduler_svc.requests.sampling import Sampling
from scheduler_svc.shapes.buckets import prefill_buckets
from scheduler_svc.shapes.shape_config import KvGroup
from scheduler_svc.shapes.shape_config import ShapeConfig as SchedulerShapeConfig
from tests.support.sampling_params import sampling_params
from worker_svc.devices import open_device
from worker_svc.execution.kv_cache import count_blocks
from worker_svc.execution.runner import Runner
from worker_svc.sampling.state import SamplingVocabulary
from worker_svc.shapes import ShapeConfig, group_layers
from worker_svc.vllm_adapter.model import VllmModel


class LocalReplica:
    """A worker's runner, driven by its own engine."""

    def __init__(
        self, model: VllmModel, *, window: GroupKind = GroupKind.PAGED_WINDOW, max_model_len: int = 2048, slots: int = 4,
        chunk: int = 128, block_size: int = 128, buckets: tuple[int, ...] = (1, 2, 4), caching: bool = True,
        decode_steps_per_chunk: int = 1, kv_bytes: int = 1 << 30, exact: bool = False,
    ) -> None:  # fmt: skip
        """Makes the graphs first if the worker is to be exact, which it must be then."""
        layers = group_layers(model.description.layers, window)
        kept = 4 if caching else 0
        chunks = prefill_buckets("exp", chunk=chunk, block_size=block_size, minimum=16)
        sizes = ShapeConfig(max_model_len, slots, chunk, block_size, buckets, (), kept, chunks)
        blocks = count_blocks(layers, sizes, kv_bytes)
        sizes = replace(sizes, num_blocks=blocks)
        self.runner = Runner(
            model,
            open_device("cpu"),
            layers,
            sizes,
            vocabulary=SamplingVocabulary(model.description.vocab_size, model.description.eos_token_ids),
        )
        groups = [KvGroup(group.kind, group.window) for group in layers]
        shapes = SchedulerShapeConfig(
            max_model_len, slots, chunk, block_size, buckets, prefill_buckets=chunks
        )
        self.engine = Engine(
            max_waiting=100, max_waiting_tokens=10**6, clock=time.monotonic, order=ArrivalOrder()
        )
        self.engine.model = ModelLimits(
            max_model_len,
            model.description.vocab_size,
            frozenset({"logprobs", "temperature"}),
            5,
            frozenset(),
        )
        options = CacheOptions(prefix_caching=caching)
        if exact:
            self.runner.make_graphs(lambda *_: None)
            assert self.runner.is_exact
            options = replace(options, chunk_starts="exact", cache_generated=True)
        kv = KvCache(shapes, groups, blocks, model="m", options=options)
        turns = Turns(decode_steps_per_chunk)
        self.scheduler = ReplicaScheduler(shapes, kv, self.engine, turns, clock=time.monotonic, depth=1)
        self.engine.attach("r", AttachedReplica(self.scheduler, lambda: None))
        self._count = 0

    def submit(
        self, prompt: Sequence[int], sink: Sink, *, num_tokens: int, logprobs: int | None = None
    ) -> None:
        """Enqueues a greedy request for exactly `num_tokens` tokens."""
        self._count += 1
        sampling = Sampling(
            sampling_params(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=logprobs)
        )
        self.engine.submit(Submission(f"r{self._count}", tuple(prompt), sampling), sink)

    def step(self, ran: Callable[[StepPlan, float], None] = lambda _plan, _seconds: None) -> bool:
        """Runs one step.

        Returns False if there is nothing to do. `ran` receives the plan and the seconds on the device.
        """
        self.engine.dispatch()
        if (plan := self.scheduler.next_plan()) is None:
            return False
        message = worker_pb2.StepPlan.FromString(plan_to_proto(plan).SerializeToString())
        started = time.perf_counter()
        received = plan_from_proto(message)
        outputs = self.runner.execute(received)
        num_steps = int(received.work is not None)
        result = result_to_proto(received, StepResult(received.step, outputs=outputs, num_steps=num_steps))
        ran(plan, time.perf_counter() - started)
        self.scheduler.update(result_from_proto(result))
        return True
