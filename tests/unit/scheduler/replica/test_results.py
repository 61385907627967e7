"""What results change about the plans that follow: steps in a result, and the sizes of chunks."""

from dataclasses import replace

import pytest

from protos.steps import Decode, Prefill, StepPlan, StepResult
from scheduler_svc.kv.cache import ChunkStarts
from scheduler_svc.requests.sampling import FinishReason
from tests.support.plan_order import SimulatedWorker
from tests.support.scheduler.factories import Rig, expected_tokens, make_rig, make_shapes, make_submission

STEP_US = 1000
PROMPTS = {"a": [5, 6, 7], "b": [8, 9]}


def make(event_interval_s: float) -> Rig:
    rig = make_rig(make_shapes(block_size=16), lease_steps=8, event_interval_s=event_interval_s)
    for name, prompt in PROMPTS.items():
        stops = [expected_tokens(prompt, 14)[13]] if name == "a" else []
        rig.submit(make_submission(prompt, request_id=name, max_tokens=30, stop_token_ids=stops))
    return rig


def run(rig: Rig) -> tuple[list[StepPlan], list[StepResult]]:
    """Runs all requests on a worker that collects as many steps as its plans say; one takes 1 ms.

    A chunk takes 1 ms a token, padding included.
    """

    def run_step(plan: StepPlan) -> StepResult:
        rows = plan.work.bucket if isinstance(plan.work, Prefill) else 1
        return replace(rig.device.run(plan), execute_us=STEP_US * rows)

    worker = SimulatedWorker(run_step)
    sent: dict[int, StepPlan] = {}
    results: list[StepResult] = []
    while True:
        rig.engine.dispatch()
        while (plan := rig.scheduler.next_plan()) is not None:
            sent[plan.step] = plan
            worker.take(plan)
        if not worker.has_work:
            return list(sent.values()), results
        steps = [worker.run()]
        work = sent[steps[0].step].work
        most = work.steps_per_result if isinstance(work, Decode) else 1
        while len(steps) < most and not steps[-1].last:
            steps.append(worker.run())
        result = steps[-1]
        if len(steps) > 1:
            tokens = tuple(token for step in steps for token in step.token_ids)
            result = replace(result, token_ids=tokens, num_steps=len(steps), execute_us=STEP_US * len(steps))
        results.append(result)
        rig.scheduler.update(result)


@pytest.mark.parametrize(("interval_s", "steps"), [(0.0, 1), (0.0005, 1), (0.004, 4), (1.0, 8)])
def test_plans_ask_for_as_many_steps_as_the_interval_holds(interval_s: float, steps: int) -> None:
    """The first decode plan, made before any step was measured, asks for each step's result."""
    plans, _ = run(make(interval_s))
    decodes = [plan.work for plan in plans if isinstance(plan.work, Decode)]
    assert decodes[0].steps_per_result == 1
    assert max(work.steps_per_result for work in decodes) == steps
    assert all(work.steps_per_result <= work.steps for work in decodes)


@pytest.mark.parametrize(("rows", "steps"), [(31, 1), (32, 5)])
def test_only_large_batches_collect_steps_by_default(rows: int, steps: int) -> None:
    """Steps take 1 ms; a message for each costs most where there are many rows, and few notice 5 ms."""
    rig = make_rig(
        make_shapes(max_num_seqs=rows, block_size=16, buckets=(1, rows)), num_blocks=4 * rows, lease_steps=8
    )
    for index in range(rows):
        rig.submit(make_submission([5 + index, 6], request_id=str(index), max_tokens=40))
    plans, _ = run(rig)
    assert max(plan.work.steps_per_result for plan in plans if isinstance(plan.work, Decode)) == steps
    assert all(len(sink.tokens) == 40 for sink in rig.sinks.values())


@pytest.mark.parametrize("interval_s", [0.002, 0.004, 0.005, 1.0])
def test_a_stop_in_the_middle_of_a_result_ends_its_request_alone(interval_s: float) -> None:
    """Later tokens of the row are dropped, those of the others are not, and both end once."""
    rig = make(interval_s)
    _, results = run(rig)
    assert max(result.num_steps for result in results) > 1
    a, b = (rig.sinks[name] for name in PROMPTS)
    assert a.tokens == expected_tokens(PROMPTS["a"], 14)
    assert b.tokens == expected_tokens(PROMPTS["b"], 30)
    assert [event.finish_reason for event in a.events if event.finish_reason] == [FinishReason.STOP]
    assert [event.finish_reason for event in b.events if event.finish_reason] == [FinishReason.LENGTH]
    assert rig.scheduler.num_running == 0
    assert rig.scheduler.stats.times.decode.seconds == pytest.approx(STEP_US * 1e-6)


@pytest.mark.parametrize("sub_block", [False, True], ids=["whole blocks", "parts of blocks"])
@pytest.mark.parametrize(
    ("starts", "block_size", "smallest"),
    [("whole", 16, 16), ("anywhere", 4, 4), ("exact", 4, 4), ("anywhere", 16, 4)],
)
def test_chunks_for_a_gap_target_begin_where_the_worker_can_begin(
    starts: ChunkStarts, block_size: int, smallest: int, *, sub_block: bool
) -> None:
    """A gap of 6 ms holds a chunk of 4 tokens and a step. The device checks starts and what it reads.

    Without parts of blocks, hits and so chunks begin at whole blocks.
    """
    shapes = replace(
        make_shapes(max_model_len=256, chunk=16, block_size=block_size), prefill_buckets=(4, 8, 16)
    )
    rig = make_rig(
        shapes, num_blocks=200, chunk_starts=starts, sub_block=sub_block, itl_target_s=0.006, finest_hit=4
    )
    prompts = {"a": [5], "b": [7 + index % 80 for index in range(101)]}
    prompts["c"] = [*prompts["b"][:50], 3, 4, *prompts["b"][:60]]
    for name, prompt in prompts.items():
        rig.submit(make_submission(prompt, request_id=name, max_tokens=100))
    plans, _ = run(rig)
    for name, prompt in prompts.items():
        assert rig.sinks[name].tokens == expected_tokens(prompt, 100)
    chunks = [plan.work for plan in plans if isinstance(plan.work, Prefill) and not plan.work.sample]
    assert min(chunk.num_tokens for chunk in chunks) == (smallest if sub_block else max(smallest, block_size))
