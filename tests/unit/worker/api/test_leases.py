"""Leased steps on the model's thread, without a model."""

from typing import cast

from protos.steps import Decode, SlotOutput, StepPlan
from protos.triptych.v1 import worker_pb2
from worker_svc.api.model_thread import ModelThread
from worker_svc.api.servicer import WorkerServicer
from worker_svc.execution.worker import Worker


class StubWorker:
    """Answers each decode step with the positions that it ran at."""

    def execute(self, plan: StepPlan) -> list[SlotOutput]:
        assert isinstance(plan.work, Decode)
        return [
            SlotOutput(slot, (position,))
            for slot, position in zip(plan.work.slots, plan.work.positions, strict=True)
        ]


class WatchedThread(ModelThread):
    """Keeps how many results there were each time that it heard of progress."""

    def __init__(self, results: list[worker_pb2.StepResult]) -> None:
        super().__init__()
        self.heard: list[int] = []
        self._results = results

    def progressed(self) -> None:
        super().progressed()
        self.heard.append(len(self._results))


async def test_each_leased_step_counts_as_progress() -> None:
    """A lease may take longer than a step may take to count as stalled."""
    results: list[worker_pb2.StepResult] = []
    thread = WatchedThread(results)

    async def on_ready() -> None: ...

    servicer = WorkerServicer(
        cast("Worker", StubWorker()), thread, prepared=thread.submit(lambda: None), worker_id="w", model="m",
        on_ready=on_ready,
    )  # fmt: skip
    decode = worker_pb2.Decode(slots=[1, 2], positions=[7, 9], bucket=2, lease_steps=4)
    plan = worker_pb2.StepPlan(step=3, decode=decode)
    await thread.submit(lambda: servicer._run(plan, lambda: False, results.append))
    assert [list(result.token_ids) for result in results] == [[7, 9], [8, 10], [9, 11], [10, 12]]
    assert [result.last for result in results] == [False, False, False, True]
    assert thread.heard == [1, 2, 3]
    await thread.close(1)
