"""The runner: how a plan changes cache and batch before its work, and which requests a fault affects."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from protos.errors import Internal
from protos.steps import Admission, BlockCopy, Decode, Growth, Prefill, SlotOutput, StepPlan
from tests.support.sampling_params import sampling_params
from tests.support.worker.layerless import GROUPS, LayerlessModel, PlainDevice
from worker_svc.devices.attention import PagedInput, StepInput
from worker_svc.execution.lockstep import PlanRefused
from worker_svc.execution.runner import Runner
from worker_svc.graphs.graph_runner import GraphOptions
from worker_svc.sampling.state import SamplingVocabulary
from worker_svc.shapes import KvGroup, ShapeConfig

GREEDY = sampling_params(temperature=0.0)
VOCABULARY = 64
SIZES = ShapeConfig(
    max_model_len=32, max_num_seqs=3, chunk=8, block_size=16, decode_buckets=(1, 2, 4), num_blocks=(9, 5)
)


class Successor(LayerlessModel):
    """A model whose next token is always the last one plus 1."""

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, plans: Mapping[str, Any], *_: torch.Tensor
    ) -> torch.Tensor:
        """Returns the token ids as hidden states."""
        del positions, plans
        return token_ids[:, None].float()

    def empty_states(self, tokens: int) -> torch.Tensor:
        raise NotImplementedError("this model is no stage of a pipeline")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Gives the successor all of the probability."""
        return torch.nn.functional.one_hot(hidden[:, 0].long() + 1, VOCABULARY).float()


class EarlyExitDevice(PlainDevice):
    """A device whose decode kernels stop at the first shorter row; it notes the lengths of rows."""

    @property
    def sorts_rows(self) -> bool:
        return True

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[list[int]] = []

    def plan(self, group: KvGroup, block_size: int, step: StepInput) -> Any:
        if isinstance(step, PagedInput):
            self.lengths.append(step.seq_lens.tolist())
        return super().plan(group, block_size, step)


@pytest.fixture
def runner() -> Runner:
    """A warmed-up runner with 1 in every cache entry."""
    return runner_on(PlainDevice())


def runner_on(device: PlainDevice) -> Runner:
    runner = Runner(
        Successor(),
        device,
        GROUPS,
        SIZES,
        vocabulary=SamplingVocabulary(VOCABULARY),
        options=GraphOptions(level=0),
    )
    runner.warm_up(lambda *_: None)
    for tensor in runner.cache.by_layer().values():
        tensor.fill_(1)
    return runner


def request(
    slot: int, token_ids: Sequence[int], computed: int = 0, blocks: tuple[int, int] | None = None
) -> Admission:
    """A request with one block in each group; by default the block number is 1 + slot."""
    full, window = blocks or (1 + slot, 1 + slot)
    return Admission(slot, token_ids, computed, GREEDY, {0: (full,), 1: (window,)})


def cleared(runner: Runner, name: str) -> list[int]:
    """The blocks of a layer that hold only zeroes."""
    cache = runner.cache.by_layer()[name]
    return [block for block in range(cache.shape[0]) if not cache[block].any()]


def test_fresh_blocks_are_cleared(runner: Runner) -> None:
    """New requests and grown ones get zeroed blocks, paged and in place."""
    runner.execute(StepPlan(1, admit=[request(0, [5, 6])]))
    assert (cleared(runner, "full"), cleared(runner, "window")) == ([1], [1])
    runner.execute(StepPlan(2, grow=[Growth(0, 0, (7,))]))
    assert (cleared(runner, "full"), cleared(runner, "window")) == ([1, 7], [1])


def test_a_chunk_that_samples_nothing_is_answered_once_it_has_run(runner: Runner) -> None:
    """Otherwise a long prompt's chunks would pile up on a device that runs ahead."""
    launched = runner.launch(
        StepPlan(1, admit=[request(0, range(1, 13))], work=Prefill(0, 0, 8, sample=False))
    )
    assert launched.runs_ahead
    assert launched.read_tokens is not None
    assert launched.read() == ((), ())


def test_a_resumed_prefix_is_not_cleared(runner: Runner) -> None:
    """Copies run in order and before admissions, so a request can resume from a copy in the same plan."""
    runner.cache.by_layer()["window"][2] = 7
    admission = Admission(0, range(1, 21), 4, GREEDY, {0: (3, 4), 1: (1,)})
    runner.execute(StepPlan(1, copies=[BlockCopy(1, 2, 4, 8), BlockCopy(1, 4, 1, 8)], admit=[admission]))
    assert (cleared(runner, "full"), cleared(runner, "window")) == ([4], [])
    assert (runner.cache.by_layer()["window"][1] == 7).all()


def test_a_refused_admission_fails_alone(runner: Runner) -> None:
    runner.execute(StepPlan(1, admit=[request(0, [5])], work=Prefill(0, 0, 1, sample=True)))
    bad = request(1, [7], blocks=(9, 2))
    outputs = runner.execute(
        StepPlan(
            2,
            admit=[bad, request(2, [9, 10], computed=1)],
            grow=[Growth(1, 0, (6,)), Growth(0, 0, (5,))],
            work=Decode((0, 1, 2), 4),
        )
    )
    assert [(each.slot, list(each.token_ids)) for each in outputs] == [(1, []), (0, [7]), (2, [11])]
    assert isinstance(outputs[0].error, Internal)
    assert "block 9 of KV group 0" in outputs[0].error.message
    # The slot is free, and the blocks that the plan granted it are untouched.
    assert 6 not in cleared(runner, "full")
    (again,) = runner.execute(StepPlan(3, admit=[request(1, [7])], work=Prefill(1, 0, 1, sample=True)))
    assert (again.slot, list(again.token_ids), again.error) == (1, [8], None)


@pytest.mark.parametrize("work", [Prefill(1, 0, 1, sample=True), Decode((1,), 1), None])
def test_a_step_for_a_refused_request_alone_does_nothing(
    runner: Runner, work: Prefill | Decode | None
) -> None:
    (output,) = runner.execute(StepPlan(1, admit=[request(1, range(40))], work=work))
    assert output.slot == 1
    assert isinstance(output.error, Internal)


def test_work_that_contradicts_an_admitted_slot_fails_the_step(runner: Runner) -> None:
    with pytest.raises(PlanRefused, match="prefills tokens 1 to 2"):
        runner.execute(StepPlan(1, admit=[request(0, [5, 6])], work=Prefill(0, 1, 1, sample=True)))


def test_a_graph_that_cannot_be_made_is_no_refused_plan(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: object) -> None:
        raise Internal("no graph")

    runner.close()
    monkeypatch.setattr(runner.graphs, "build", build)
    with pytest.raises(Internal, match="no graph") as raised:
        runner.execute(StepPlan(1, admit=[request(0, [5, 6])], work=Prefill(0, 0, 2, sample=True)))
    assert not isinstance(raised.value, PlanRefused)


class BrokenTensor:
    """Stands in for a tensor of a device that fails."""

    def __setitem__(self, place: object, value: object) -> None:
        raise RuntimeError("the device failed")


def test_a_device_that_fails_while_slots_are_freed_leaves_them_free(runner: Runner) -> None:
    """The step fails; later plans may still give the slots to other requests."""
    runner.execute(StepPlan(1, admit=[request(0, [5, 6]), request(1, [7, 8])]))
    tables = runner._batch._tables
    runner._batch._tables = [BrokenTensor()] * len(tables)  # type: ignore[list-item]
    with pytest.raises(RuntimeError, match="the device failed"):
        runner.execute(StepPlan(2, release=[0, 1]))
    runner._batch._tables = tables
    assert runner.execute(StepPlan(3, admit=[request(0, [9, 9]), request(1, [9, 9])])) == []
    (output,) = runner.execute(StepPlan(4, Prefill(1, 0, 2, sample=True)))
    assert list(output.token_ids) == [10]


def test_steps_launched_ahead_keep_their_tokens(runner: Runner) -> None:
    runner.execute(StepPlan(1, admit=[request(0, [5, 6])], work=Prefill(0, 0, 2, sample=True)))
    launched = [runner.launch(StepPlan(2, work=Decode((0,), 1))) for _ in range(3)]
    assert all(step.runs_ahead and step.read_tokens is not None for step in launched)
    assert [step.wait()[0].token_ids for step in launched] == [(8,), (9,), (10,)]


@pytest.mark.parametrize("field", [{"logprobs": 1}, {"allowed_token_ids": (7, 8)}])
def test_a_step_with_more_to_tell_is_not_run_ahead(runner: Runner, field: dict[str, Any]) -> None:
    sampling = sampling_params(temperature=0.0, **field)
    admission = Admission(0, [5, 6], 0, sampling, {0: (1,), 1: (1,)})
    runner.execute(StepPlan(1, admit=[admission], work=Prefill(0, 0, 2, sample=True)))
    launched = runner.launch(StepPlan(2, work=Decode((0,), 1)))
    assert not launched.runs_ahead
    assert [output.token_ids for output in launched.outputs] == [(8,)]


def test_all_steps_of_a_plan_are_checked_with_the_first(runner: Runner) -> None:
    runner.execute(StepPlan(1, admit=[request(0, [5] * 14)], work=Prefill(0, 0, 8, sample=False)))
    runner.execute(StepPlan(2, work=Prefill(0, 8, 6, sample=True)))
    with pytest.raises(Internal, match="too few for 17 tokens"):
        runner.execute(StepPlan(3, work=Decode((0,), 1, 3)))


@pytest.mark.parametrize("logprobs", [False, True])
def test_rows_descend_by_length_where_kernels_need_it(logprobs: bool) -> None:
    """Tokens and outputs still come in the order of the plan. Padding is last."""
    sampling = sampling_params(temperature=0.0, logprobs=1) if logprobs else GREEDY
    device = EarlyExitDevice()
    runner = runner_on(device)
    prompts = {0: [5, 6], 1: [20], 2: [9, 10, 11, 12]}
    for slot, prompt in prompts.items():
        runner.execute(
            StepPlan(
                slot,
                admit=[replace(request(slot, prompt), sampling=sampling)],
                work=Prefill(slot, 0, len(prompt), sample=True),
            )
        )
    for number, slots in enumerate([(0, 1, 2), (2, 1, 0), (0, 2)], start=3):
        device.lengths.clear()
        launched = runner.launch(StepPlan(number, work=Decode(slots, 4)))
        expected = [prompts[slot][-1] + number - 1 for slot in slots]
        outputs = launched.wait()
        assert [(each.slot, list(each.token_ids)) for each in outputs] == [
            (slot, [token]) for slot, token in zip(slots, expected, strict=True)
        ]
        lengths = [len(prompts[slot]) + number - 2 for slot in slots]
        assert device.lengths == [[*sorted(lengths, reverse=True), *[1] * (4 - len(slots))]]


def test_a_decode_step_skips_slots_that_are_not_ready(runner: Runner) -> None:
    """A slot with several known tokens to compute takes part again once a chunk has computed them."""
    admit = [request(0, [5, 6]), request(1, [7, 8, 9], computed=1)]
    runner.execute(StepPlan(1, admit=admit, work=Prefill(0, 0, 2, sample=True)))
    launched = runner.launch(StepPlan(2, work=Decode((1, 0), 2)))
    assert launched.work == Decode([0], 2)
    assert launched.wait() == [SlotOutput(0, (8,))]
    nothing = runner.launch(StepPlan(3, work=Decode((1,), 1)))
    assert (nothing.work, nothing.wait()) == (None, [])
    runner.execute(StepPlan(4, work=Prefill(1, 1, 2, sample=True)))
    assert [output.token_ids for output in runner.execute(StepPlan(5, work=Decode((1, 0), 2)))] == [
        (11,),
        (9,),
    ]
