"""A worker with a simulated pooling model that speaks the Worker service over real gRPC."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from protos.errors import Context, Internal
from protos.triptych.v1 import common_pb2, inference_pb2, worker_pb2
from tests.support.scheduler.fake_worker import FakeWorker

POISON = 66
"""The worker fails prompts that contain this token."""


def embedding_of(prompt: Sequence[int]) -> list[float]:
    """Returns the result of the simulated model for a prompt."""
    return [float(len(prompt)), float(sum(prompt)), float(prompt[0]), float(prompt[-1])]


def pool_request(
    prompt: Sequence[int] = (5, 6, 7), *, request_id: str = "", model: str = "", priority: int = 0
) -> inference_pb2.PoolRequest:
    return inference_pb2.PoolRequest(
        request_id=request_id, prompt_token_ids=prompt, task=common_pb2.POOL_TASK_EMBED, model=model,
        priority=priority,
    )  # fmt: skip


@dataclass
class FakePoolWorker(FakeWorker):
    """Serves a pooling model and checks every plan as a device would."""

    fail_step: int | None = None
    """Answers this step with an error."""
    fails_with: int | None = None
    """Answers every batch that contains this token with an error."""
    dies_with: int | None = None
    """Ends the stream instead of running a batch that contains this token."""
    max_batch: int = 8
    pooled_size: int = 4
    batches: list[tuple[int, int, int]] = field(default_factory=list)
    """Every step in order: (requests, rows of the shape, tokens per row)."""
    received: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a plan has arrived."""
    pooling: list[common_pb2.PoolingParams] = field(default_factory=list)
    """The pooling parameters of every admitted request, in order."""
    tasks: "Sequence[common_pb2.PoolTask.ValueType]" = (common_pb2.POOL_TASK_EMBED,)
    info: common_pb2.PoolingInfo = field(default_factory=common_pb2.PoolingInfo)
    """Facts about the model."""

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: Context
    ) -> worker_pb2.DescribeResponse:
        return worker_pb2.DescribeResponse(
            schema_revision=self.schema_revision, worker_id="w", device="cpu", device_name="simulated",
            model=common_pb2.ModelInfo(source=self.source, architecture="Sum", vocab_size=97, max_model_len=64,
                                       dtype="float32", pooled_size=self.pooled_size, pooling=self.info),
            max_batch=self.max_batch, graph_kinds=[common_pb2.GRAPH_KIND_POOL], pool_tasks=self.tasks,
        )  # fmt: skip

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.StepPlan], context: Context
    ) -> AsyncIterator[worker_pb2.StepResult]:
        assert self.configured is not None
        shapes = {(shape.batch, shape.query_len) for shape in self.configured.pool_shapes}
        slots: dict[int, worker_pb2.SlotRequest] = {}
        async for plan in request_iterator:
            if plan.step == 0:
                yield worker_pb2.StepResult(last=True)
                continue
            for slot in plan.release:
                del slots[slot]
            for request in plan.admit:
                assert request.slot not in slots
                assert not request.blocks
                slots[request.slot] = request
                self.pooling.append(request.pooling)
            shape = plan.pool.shape
            assert (shape.batch, shape.query_len) in shapes
            assert len(plan.pool.slots) <= shape.batch
            assert all(len(slots[slot].token_ids) <= shape.query_len for slot in plan.pool.slots)
            self.batches.append((len(plan.pool.slots), shape.batch, shape.query_len))
            self.received.set()
            await self.gate.wait()
            self.steps += 1
            tokens = {token for slot in plan.pool.slots for token in slots[slot].token_ids}
            if self.steps == self.die_at_step or self.dies_with in tokens:
                return
            if self.steps == self.fail_step or self.fails_with in tokens:
                yield worker_pb2.StepResult(
                    step=plan.step, last=True, num_steps=1, error=Internal("the device failed").to_proto()
                )
                continue
            outputs = [_output(slot, slots[slot]) for slot in plan.pool.slots]
            yield worker_pb2.StepResult(step=plan.step, last=True, num_steps=1, outputs=outputs)


def _output(slot: int, request: worker_pb2.SlotRequest) -> worker_pb2.SlotOutput:
    prompt, pooling = request.token_ids, request.pooling
    if POISON in prompt:
        return worker_pb2.SlotOutput(slot=slot, error=Internal("not finite").to_proto())
    if pooling.task == common_pb2.POOL_TASK_TOKEN_EMBED:
        return worker_pb2.SlotOutput(
            slot=slot, pooled=[value for token in prompt for value in embedding_of([token])]
        )
    return worker_pb2.SlotOutput(slot=slot, pooled=embedding_of(prompt)[: pooling.dimensions or None])
