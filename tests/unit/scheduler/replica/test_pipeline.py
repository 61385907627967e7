"""Plans for a worker of several pipeline stages: all stages have work, and nothing waits without need."""

import itertools
from collections import deque
from collections.abc import Callable

import pytest

from protos.steps import Decode, GroupKind, Prefill, StepPlan, StepResult, slots_of
from scheduler_svc.shapes.shape_config import KvGroup
from tests.support.scheduler.factories import (
    FULL,
    Rig,
    expected_tokens,
    make_rig,
    make_shapes,
    make_submission,
)

CHUNK = 4


class PipelinedWorker:
    """Passes, in virtual time, each plan through all stages, in order, and answers it behind the last one."""

    def __init__(self, rig: Rig, takes: Callable[[StepPlan], float], stages: int) -> None:
        """Drives the rig's scheduler and its clock."""
        self._rig = rig
        self._takes = takes
        self._free_at = [0.0] * stages
        # By slot: when its latest token leaves the last stage, which the first one needs for the next token.
        self._sampled_at: dict[int, float] = {}
        self.in_flight: deque[tuple[float, StepPlan, StepResult]] = deque()
        """When each plan leaves the last stage, the plan, and its result."""
        self.plans: list[StepPlan] = []
        """All plans, in order."""
        self.busy = 0.0
        """Time for which the first stage has worked or is going to work on the plans sent so far."""

    def send(self) -> None:
        """Sends all plans that the scheduler has now."""
        rig = self._rig
        rig.engine.dispatch()
        while (plan := rig.scheduler.next_plan()) is not None:
            self.take(plan)

    def answer(self) -> StepPlan:
        """Goes on to the time at which the oldest plan is answered; returns that plan."""
        self._rig.now, plan, result = self.in_flight.popleft()
        self._rig.scheduler.update(result)
        return plan

    def run(self, until: Callable[[], bool]) -> None:
        """Sends and answers plans until a condition holds."""
        self.send()
        while not until():
            assert self.in_flight, "nothing is in flight"
            self.answer()
            self.send()

    def take(self, plan: StepPlan) -> None:
        """Takes a plan that is sent now."""
        self.plans.append(plan)
        takes, now = self._takes(plan), self._rig.now
        self.busy += takes
        slots = slots_of(plan.work)
        if isinstance(plan.work, Decode):
            now = max(now, *(self._sampled_at.get(slot, 0.0) for slot in slots))
        for stage, free_at in enumerate(self._free_at):
            now = self._free_at[stage] = max(now, free_at) + takes
        self._sampled_at |= dict.fromkeys(slots, now)
        self.in_flight.append((now, plan, self._rig.device.run(plan)))


def pipeline(stages: int, *, slots: int = 8, **fields: object) -> Rig:
    shapes = make_shapes(
        max_model_len=512, max_num_seqs=slots, chunk=CHUNK, block_size=8, buckets=(1, 2, 4, 8, 16, 32), stages=stages
    )  # fmt: skip
    return make_rig(shapes, **{"num_blocks": 2000} | fields)  # type: ignore[arg-type]


def worker_of(rig: Rig) -> PipelinedWorker:
    """Returns a worker whose stages take one unit of time for any step."""
    return PipelinedWorker(rig, lambda _: 1.0, rig.shapes.stages)


def submit(rig: Rig, *max_tokens: int, prompt_len: int = 1) -> None:
    for count in max_tokens:
        index = len(rig.sinks)
        prompt = [3 + (index * 7 + position) % 90 for position in range(prompt_len)]
        rig.submit(make_submission(prompt, request_id=f"r{index}", max_tokens=count))


def settle(rig: Rig, worker: PipelinedWorker, num_decoding: int) -> None:
    """Runs until that many requests decode and none prefills."""
    scheduler = rig.scheduler
    worker.run(lambda: len(scheduler._decoding) == num_decoding and not scheduler.prefill_backlog)
    for _ in range(2 * rig.shapes.stages):
        worker.answer()
        worker.send()


@pytest.mark.parametrize("stages", [2, 4])
def test_in_steady_decode_the_batches_take_turns(stages: int) -> None:
    """Each has its share of the requests and a step on a stage; the next one in turn has a step waiting."""
    rig = pipeline(stages)
    worker = worker_of(rig)
    submit(rig, *[100] * 8)
    settle(rig, worker, 8)
    for _ in range(20):
        *works, waiting = [plan.work for _, plan, _ in worker.in_flight]
        assert len(works) == stages
        assert waiting == works[0]
        slots = [slot for work in works if isinstance(work, Decode) for slot in work.slots]
        assert sorted(slots) == list(range(8))
        assert {work.bucket for work in works if isinstance(work, Decode)} == {8 // stages}
        worker.answer()
        worker.send()


def test_the_first_stage_is_busy_with_64_requests() -> None:
    """Every request gets its tokens, in steps of a stage's batch. One batch for all keeps one stage busy."""
    stages = 4
    rig = pipeline(stages, slots=64)
    worker = worker_of(rig)
    submit(rig, *[60] * 64)
    worker.run(lambda: not rig.scheduler.is_busy)
    assert worker.busy / rig.now >= 0.95
    for index in range(64):
        assert rig.sinks[f"r{index}"].tokens == expected_tokens([3 + index * 7 % 90], 60)
    assert max(len(plan.work.slots) for plan in worker.plans if isinstance(plan.work, Decode)) == 64 // stages
    alone = make_rig(make_shapes(max_model_len=512, max_num_seqs=64, buckets=(64,)), num_blocks=2000)
    one_batch = PipelinedWorker(alone, lambda _: 1.0, stages)
    submit(alone, *[60] * 64)
    one_batch.run(lambda: not alone.scheduler.is_busy)
    assert one_batch.busy / alone.now <= 1 / stages + 0.11


def test_slots_that_no_stage_has_a_row_for_stay_free() -> None:
    """Ten slots on four stages are two rows a stage."""
    rig = pipeline(4, slots=10)
    worker = worker_of(rig)
    submit(rig, *[50] * 10)
    settle(rig, worker, 8)
    assert (rig.scheduler.num_running, rig.engine.num_waiting) == (8, 2)


@pytest.mark.parametrize("num_decoding", [0, 1, 2])
def test_the_chunks_of_a_prompt_fill_the_stages(num_decoding: int) -> None:
    """None waits for the one before, whether or not other requests decode meanwhile."""
    rig = pipeline(2, decode_steps_per_chunk=1)
    worker = worker_of(rig)
    submit(rig, *[400] * num_decoding)
    if num_decoding:
        settle(rig, worker, num_decoding)
    submit(rig, 2, prompt_len=40 * CHUNK)
    name, began, busy = f"r{num_decoding}", rig.now, worker.busy
    worker.run(lambda: bool(rig.sinks[name].tokens))
    assert (worker.busy - busy) / (rig.now - began) >= 0.95
    assert rig.sinks[name].tokens == expected_tokens([3 + (num_decoding * 7 + i) % 90 for i in range(160)], 1)


@pytest.mark.parametrize(("stages", "num_decoding"), [(2, 1), (2, 4), (4, 2)])
def test_a_long_prompt_stalls_decoding_requests_by_a_chunk_of_the_whole_model(
    stages: int, num_decoding: int
) -> None:
    """The longest gap between two tokens is the time of two chunks and steps, each through all stages."""
    chunk_s, decode_s = 1.0, 0.3
    rig = pipeline(stages)
    worker = PipelinedWorker(
        rig, lambda plan: (chunk_s if isinstance(plan.work, Prefill) else decode_s) / stages, stages
    )
    submit(rig, *[400] * num_decoding)
    settle(rig, worker, num_decoding)
    submit(rig, 2, prompt_len=30 * CHUNK)
    came: list[list[float]] = [[] for _ in range(num_decoding)]
    worker.send()
    while not rig.sinks[f"r{num_decoding}"].tokens:
        counts = [len(rig.sinks[f"r{index}"].tokens) for index in range(num_decoding)]
        worker.answer()
        for index in range(num_decoding):
            came[index] += [rig.now] * (len(rig.sinks[f"r{index}"].tokens) - counts[index])
        worker.send()
    gaps = [later - earlier for times in came for earlier, later in itertools.pairwise(times)]
    # A step passes through all stages behind the plans in flight: one on each stage, and one that waits.
    assert max(gaps) <= 2 * (chunk_s + decode_s)
    assert rig.scheduler.stats.prefills[CHUNK].steps >= 30


def test_chunks_wait_for_one_another_where_a_window_slides_in_place() -> None:
    """Its content may have to be kept before the next chunk moves it; another prompt goes on meanwhile."""
    rig = pipeline(2, groups=[FULL, KvGroup(GroupKind.IN_PLACE_WINDOW, 4)], num_blocks=200)
    submit(rig, 2, 2, prompt_len=4 * CHUNK)
    worker = worker_of(rig)
    worker.send()
    assert [plan.work.slot for plan in worker.plans if isinstance(plan.work, Prefill)] == [0, 1]
    worker.run(lambda: not rig.scheduler.is_busy)
    assert all(len(sink.tokens) == 2 for sink in rig.sinks.values())


def test_requests_move_to_a_stage_that_has_become_idle() -> None:
    """All requests of one batch end; the other one's are divided again."""
    rig = pipeline(2, slots=4)
    worker = worker_of(rig)
    submit(rig, 100, 10, 100, 10)
    settle(rig, worker, 4)
    worker.run(lambda: len(rig.scheduler._decoding) == 2)
    for _ in range(6):
        worker.answer()
        worker.send()
    assert [len(batch.members) for batch in rig.scheduler._decoding._batches] == [1, 1]
    worker.run(lambda: not rig.scheduler.is_busy)
    assert [len(rig.sinks[f"r{index}"].tokens) for index in range(4)] == [100, 10, 100, 10]
