"""What a rank does with an error in a step: others may wait for it in a collective."""

import queue
from dataclasses import dataclass
from typing import Any, cast

import pytest

from protos.errors import ConfigurationRefused, Internal
from protos.steps import Decode, StepPlan, StepResult
from tests.support.ranks.fake_ranks import FakeGroup, FakeSteps, Ranks
from worker_svc.devices.cpu.device import CpuDevice
from worker_svc.execution.lockstep import Follower, Leader, PlanRefused, rank_facts
from worker_svc.pending_step import PendingStep
from worker_svc.settings import Settings

PLAN = StepPlan(1, work=Decode((0,), 1))

# By the error of a step, why the rank gives up; nothing if it goes on.
ERRORS = [
    (PlanRefused("the plan admits a request to slot 1, which is taken"), []),
    (Internal("the worker is not configured"), ["the worker is not configured"]),
    (ConfigurationRefused("the graph does not compile"), ["the graph does not compile"]),
    (RuntimeError("the device is gone"), ["the device is gone"]),
]


@dataclass
class FailingSteps:
    """Fails each step with an error."""

    error: Exception

    def launch(self, plan: StepPlan) -> PendingStep:
        raise self.error

    def apply(self, result: StepResult) -> None:
        """Has no step to apply a result to."""

    def reset(self) -> None:
        """Has no slot."""


@pytest.mark.parametrize(("error", "reasons"), ERRORS)
def test_a_step_that_fails_on_one_rank_ends_the_process(error: Exception, reasons: list[str]) -> None:
    """All ranks refuse a plan that contradicts earlier ones; any other error may be this rank's alone."""
    ranks, given_up = Ranks(2, 1), list[str]()
    groups = [cast("Any", FakeGroup(ranks, rank)) for rank in (0, 1)]
    leader = Leader(FailingSteps(error), groups[0], given_up.append)
    with pytest.raises(type(error), match=str(error)):
        leader.launch(PLAN)
    assert given_up == [f"rank 0 cannot go on with its group ({reason})" for reason in reasons]
    given_up.clear()
    follower = Follower(FailingSteps(error), groups[1], given_up.append, lambda: None, lambda _: None)
    announcement = follower.wait()
    if reasons:
        with pytest.raises(type(error), match=str(error)):
            follower.run(announcement)
    else:
        assert follower.run(announcement) is None
    assert given_up == [f"rank 1 cannot go on with its group ({reason})" for reason in reasons]


def test_a_rank_that_waits_for_results_ends_with_its_group() -> None:
    ranks, given_up = Ranks(1, 3), queue.SimpleQueue[str]()
    first, between = (cast("Any", FakeGroup(ranks, rank)) for rank in (0, 1))
    Follower(FailingSteps(RuntimeError()), between, given_up.put, lambda: None, lambda _: None)
    leader = Leader(FakeSteps(ranks, 0), first, given_up.put)
    launched = leader.launch(PLAN)
    ranks.close()
    with pytest.raises(RuntimeError, match="the group has ended"):
        launched.read()
    reasons = {given_up.get(timeout=10) for _ in range(2)}
    assert reasons == {f"rank {rank} cannot go on with its group (the group has ended)" for rank in (0, 1)}


def test_a_result_that_cannot_be_read_ends_the_process() -> None:
    ranks, given_up = Ranks(1, 3), queue.SimpleQueue[str]()
    group = cast("Any", FakeGroup(ranks, 1))
    Follower(FailingSteps(RuntimeError()), group, given_up.put, lambda: None, lambda _: None)
    ranks.end(2, "results").send(b"no message")
    assert given_up.get(timeout=10).startswith("rank 1 cannot go on with its group")


def test_a_result_that_rank_0_cannot_read_ends_its_process() -> None:
    """Its next configuration would wait for the result, and no later step would get its own."""
    ranks = Ranks(1, 2)
    reasons: list[str] = []
    steps = FakeSteps(ranks, 0, runs_ahead=False)
    leader = Leader(steps, cast("Any", FakeGroup(ranks, 0)), reasons.append)
    launched = leader.launch(PLAN)
    ranks.end(1, "results").send(b"no message")
    with pytest.raises(Exception, match="parsing"):
        launched.read()
    assert len(reasons) == 1
    assert reasons[0].startswith("rank 0 cannot go on with its group")


def facts(dtype: str = "float32", **fields: Any) -> dict[str, str]:
    return rank_facts(Settings(model="m", **fields), CpuDevice(), dtype)


@pytest.mark.parametrize(
    ("other", "key"),
    [
        ({"enable_warm_up": False}, "--enable-warm-up"),
        ({"compile_strict": True}, "--compile-strict"),
        ({"optimization_level": 2}, "-O"),
        ({"dtype": "bfloat16"}, "dtype"),
    ],
)
def test_a_flag_that_ranks_must_share_is_a_fact(other: dict[str, Any], key: str) -> None:
    usual, changed = facts(), facts(**other)
    assert {name for name in usual.keys() | changed.keys() if usual[name] != changed[name]} == {key}


def test_flags_of_one_rank_are_no_facts() -> None:
    assert facts() == facts(port=1, kv_memory=2.0, cpu_threads=3, local_rank=1)


def test_versions_and_the_device_are_facts() -> None:
    """Kernels of another release, or of another device, compute slightly different logits."""
    assert {"device", "version of python", "version of torch"} <= facts().keys()
