"""Two stages of a model without layers, in threads: rank 0 decodes without a scheduler between steps."""

import queue
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from protos.steps import Decode, Prefill, SlotOutput, StepPlan, StepResult, slots_of
from tests.support.ranks.fake_ranks import FakeGroup, Ranks, Waiting, follow
from tests.support.sampling_params import sampling_params
from tests.support.worker.layerless import GROUPS, LayerlessModel, PlainDevice
from tests.support.worker.replay_worker import SIZES, VOCAB, RemainderConstraints, admission
from worker_svc.api.plan_runner import PlanRunner
from worker_svc.execution.lockstep import Follower, Leader
from worker_svc.execution.runner import Runner
from worker_svc.grammars.constraints import FollowingConstraints, StepConstraints
from worker_svc.graphs.graph_runner import GraphOptions
from worker_svc.sampling.state import SamplingVocabulary

GREEDY = sampling_params(temperature=0.0)
FORCING = f"{VOCAB} 7 8"
"""A grammar that allows 7 and 8 in turn, two of them at a time."""


class StageOfSuccessor(LayerlessModel):
    """A stage of a model whose next token is always the last one plus 1."""

    def __init__(self, *, is_first: bool) -> None:
        self._is_first = is_first

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, plans: Mapping[str, Any], *_: torch.Tensor
    ) -> torch.Tensor:
        """Passes the token ids through, float32 [1, tokens, 1] between the stages."""
        del positions, plans
        return tokens[None, :, None].float() if self._is_first else tokens[0]

    def empty_states(self, tokens: int) -> torch.Tensor:
        return torch.zeros(1, tokens, 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Gives the successor all of the probability."""
        return torch.nn.functional.one_hot(hidden[:, 0].long() + 1, VOCAB).float()


class Replica:
    """Both stages, and what the results of rank 0 say."""

    def __init__(self) -> None:
        ranks, states = Ranks(1, 2), queue.SimpleQueue[torch.Tensor]()
        self.reasons: list[str] = []
        groups = []
        for rank in (0, 1):
            group: Any = FakeGroup(ranks, rank)
            group.links = SimpleNamespace(send=states.put, receive=lambda _: states.get())
            groups.append(group)
        constraints: Sequence[StepConstraints] = (
            FollowingConstraints(cast("Any", None)),
            RemainderConstraints(),
        )
        first, last = (
            Runner(
                StageOfSuccessor(is_first=group.layout.is_first_stage), PlainDevice(), GROUPS, SIZES,
                vocabulary=SamplingVocabulary(VOCAB), options=GraphOptions(level=0), constraints=each, group=group,
            )
            for group, each in zip(groups, constraints, strict=True)
        )  # fmt: skip
        none: Any = lambda *_: None  # noqa: E731
        follower = Follower(last, groups[1], self.reasons.append, none, none)
        self._threads = [threading.Thread(target=follow, args=(follower,), daemon=True)]
        self._threads[0].start()
        self._waiting = Waiting()
        leader = Leader(first, groups[0], self.reasons.append)
        self._runner = PlanRunner(leader.launch, self.is_interrupted, self._waiting, hand_over=self._take)
        self._ranks = ranks
        self._step = 0
        self.tokens: defaultdict[int, list[int]] = defaultdict(list)
        self.results: list[StepResult] = []

    def is_interrupted(self, step: int) -> bool:
        del step
        return False

    def run(self, **fields: Any) -> None:
        """Runs a plan; its results may come later."""
        self._step += 1
        self._runner.run(StepPlan(self._step, **fields))

    def settle(self) -> None:
        """Waits for all results."""
        self._waiting.settle()
        assert self.reasons == []

    def close(self) -> None:
        self.settle()
        self._ranks.close()
        self._threads[0].join(20)
        self._waiting.close()

    def _take(self, plan: StepPlan, result: StepResult) -> None:
        assert result.error is None
        self.results.append(result)
        slots = [*slots_of(plan.work)] * result.num_steps
        given = [SlotOutput(slot, (token,)) for slot, token in zip(slots, result.token_ids, strict=False)]
        for output in given or result.outputs:
            self.tokens[output.slot] += output.token_ids


@pytest.fixture
def replica() -> Iterator[Replica]:
    """Two stages with a request in slot 0."""
    replica = Replica()
    replica.run(admit=[admission(0, [4, 5], GREEDY)], work=Prefill(0, 0, 2, sample=True))
    yield replica
    replica.close()


def test_the_same_rows_are_sent_again_and_again(replica: Replica) -> None:
    """Each step waits for the one before, in rank 0; other requests' steps lie between them."""
    replica.run(admit=[admission(1, [50], GREEDY)], work=Prefill(1, 0, 1, sample=True))
    for _ in range(3):
        replica.run(work=Decode((0,), 1))
        replica.run(work=Decode((1,), 1))
    replica.run(work=Decode((1, 0), 2, steps=4, steps_per_result=4))
    replica.settle()
    assert replica.tokens == {0: [*range(6, 14)], 1: [*range(51, 59)]}
    assert [(result.num_steps, len(result.token_ids)) for result in replica.results][-1] == (4, 8)


def test_forced_tokens_leave_a_row_out_on_all_stages(replica: Replica) -> None:
    """Plans that were sent before they were known run the others; a chunk brings the row back."""
    admit = [admission(1, [5], GREEDY, FORCING)]
    replica.run(admit=admit, work=Prefill(1, 0, 1, sample=True))
    replica.run(work=Decode((0, 1), 2, steps=3))
    replica.settle()
    assert replica.tokens == {0: [6, 7, 8, 9], 1: [7, 8]}
    replica.run(work=Prefill(1, 1, 2, sample=True))
    replica.run(work=Decode((0, 1), 2, steps=2))
    replica.settle()
    assert replica.tokens == {0: [*range(6, 12)], 1: [7, 8, 7, 8]}


def test_a_refused_request_and_a_refused_plan_leave_the_stages_alike(replica: Replica) -> None:
    refused = admission(1, [5] * (SIZES.max_model_len + 1), GREEDY)
    replica.run(admit=[refused], work=Decode((0, 1), 2))
    replica.run(work=Decode((0, 1), 2))
    replica.settle()
    assert [output.slot for output in replica.results[1].outputs] == [1, 0]
    assert replica.tokens[0] == [6, 7, 8]
    replica.run(release=[1], admit=[admission(1, [20], GREEDY)], work=Prefill(1, 0, 1, sample=True))
    replica.run(work=Decode((0, 1), 2))
    replica.settle()
    assert replica.tokens == {0: [6, 7, 8, 9], 1: [21, 22]}
