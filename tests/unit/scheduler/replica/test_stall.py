"""Bounded stall: no stream waits longer than one chunk and one step, whatever arrives."""

import itertools

import pytest

from protos.steps import Decode, Prefill, StepPlan
from tests.support.scheduler.factories import Rig, make_rig, make_shapes, make_submission

RUNNING, LONG = 16, 4000
# Seconds per step on the simulated device.
CHUNK_S, DECODE_S = 0.056, 0.021


def _rig(ratio: int) -> Rig:
    shapes = make_shapes(
        max_model_len=8192, max_num_seqs=RUNNING + 2, chunk=128, block_size=128, buckets=(1, 16, 18)
    )
    rig = make_rig(shapes, num_blocks=200, decode_steps_per_chunk=ratio)
    for index in range(RUNNING):
        rig.submit(make_submission([3 + index, 4, 5], request_id=f"running{index}", max_tokens=1000))
    while sum(bool(rig.sinks[f"running{index}"].tokens) for index in range(RUNNING)) < RUNNING:
        rig.step()
    return rig


def _takes(plan: StepPlan) -> float:
    return CHUNK_S if isinstance(plan.work, Prefill) else DECODE_S


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_a_long_prompt_stalls_running_requests_by_one_chunk_at_a_time(ratio: int) -> None:
    """Sixteen decode when 4,000 tokens arrive: the longest gap between tokens is one chunk and a step."""
    rig = _rig(ratio)
    rig.submit(make_submission([7] * LONG, request_id="long", max_tokens=1))
    came: dict[str, list[float]] = {name: [] for name in rig.sinks}
    chunks = 0
    while not rig.sinks["long"].tokens:
        before = {name: len(sink.tokens) for name, sink in rig.sinks.items()}
        (plan,) = rig.step()
        rig.now += _takes(plan)
        chunks += isinstance(plan.work, Prefill)
        for name, sink in rig.sinks.items():
            came[name] += [rig.now] * (len(sink.tokens) - before[name])
    assert chunks == -(-LONG // 128)
    gaps = [
        later - earlier
        for name, times in came.items()
        if name != "long"
        for earlier, later in itertools.pairwise(times)
    ]
    assert len(gaps) >= RUNNING * (chunks - 2) * ratio
    assert max(gaps) == pytest.approx(CHUNK_S + DECODE_S)


def test_prefill_first_stalls_running_requests_for_the_whole_prompt() -> None:
    """With a ratio of 0, no token comes between the chunks."""
    rig = _rig(0)
    rig.submit(make_submission([7] * LONG, request_id="long", max_tokens=1))
    kinds = [type(plan.work) for _ in range(40) for plan in rig.step()]
    assert kinds[:32] == [Prefill] * 32
    assert kinds[32] is Decode


def test_when_nothing_decodes_chunks_follow_one_another() -> None:
    """The ratio applies only while both kinds of work exist."""
    rig = make_rig(make_shapes(max_model_len=64, chunk=4), decode_steps_per_chunk=4)
    rig.submit(make_submission([7] * 30, request_id="alone", max_tokens=1))
    assert [type(plan.work) for plan in rig.run() if plan.work is not None] == [Prefill] * 8
