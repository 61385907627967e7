"""The slots' sampling state against a naive model: admission, sampling, preemption and resumption."""

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import gateway.schemas.sampling
from protos import limits
from protos.triptych.v1 import common_pb2
from protos.validation import check_fields
from tests.support.property_settings import machine
from tests.support.sampling_params import complete_params
from tests.support.worker.sampling import LONGEST, admit, choose, expected_logits, make_state, request
from worker_svc.sampling.sampler import compute_logprobs, sample
from worker_svc.sampling.state import (
    MAX_BAN_TOKENS,
    MAX_BANS,
    MAX_BIASES,
    SamplingOps,
    SamplingState,
    SamplingVocabulary,
    sampling_bytes,
    state_bytes,
)
from worker_svc.sampling.thinking import thinking_bytes
from worker_svc.sampling.workspace import WORKSPACE_BYTES

VOCAB = 70
SLOTS = 4
ENDS = (0, 69)

tokens = st.integers(0, VOCAB - 1)
samplings = st.builds(
    complete_params,
    temperature=st.sampled_from([0.0, 1.0]),
    top_k=st.sampled_from([0, 1, 5]),
    seed=st.integers(0, 2**64 - 1),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.6]),
    logit_bias=st.one_of(st.just({}), st.dictionaries(tokens, st.sampled_from([-5.0, 2.0]), max_size=20)),
    # Short lists, with other parameters, may leave only early end tokens or no token at all.
    allowed_token_ids=st.one_of(
        st.just(()),
        st.lists(tokens, min_size=20, max_size=50).map(tuple),
        st.lists(st.sampled_from([0, 5, 7]), min_size=1).map(tuple),
    ),
    bad_words=st.lists(
        st.lists(st.one_of(tokens, st.just(7)), min_size=1, max_size=3).map(tuple), max_size=3
    ).map(tuple),
    min_tokens=st.sampled_from([0, 3]),
    stop_token_ids=st.sampled_from([(), (5, 6)]),
)


class Slots(RuleBasedStateMachine):
    """Slots that are filled, advanced together or in part, freed and filled again."""

    @initialize()
    def start(self) -> None:
        """Starts with free slots."""
        self.state = make_state([], VOCAB, slots=SLOTS, ends=ENDS)
        self.running: dict[int, tuple[common_pb2.SamplingParams, list[int], list[int]]] = {}
        self.preempted: list[tuple[common_pb2.SamplingParams, list[int], list[int]]] = []
        self.steps = 0

    @precondition(lambda self: len(self.running) < SLOTS)
    @rule(sampling=samplings, prompt=st.lists(tokens, min_size=1, max_size=10), data=st.data())
    def admit_new(self, sampling: common_pb2.SamplingParams, prompt: list[int], data: st.DataObject) -> None:
        """Admits a new request."""
        self._admit(data, sampling, prompt, [])

    @precondition(lambda self: self.preempted and len(self.running) < SLOTS)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        """Resumes a preempted request with its tokens."""
        self._admit(data, *self.preempted.pop())

    def _admit(
        self, data: st.DataObject, sampling: common_pb2.SamplingParams, prompt: list[int], output: list[int]
    ) -> None:
        slot = data.draw(st.sampled_from([slot for slot in range(SLOTS) if slot not in self.running]))
        admit(self.state, request(slot, sampling, prompt, output))
        self.running[slot] = (sampling, prompt, output)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """Preempts a request."""
        self.preempted.append(self.running.pop(data.draw(st.sampled_from(sorted(self.running)))))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        """Samples a token for some requests and compares it with the definitions."""
        slots = data.draw(st.lists(st.sampled_from(sorted(self.running)), min_size=1, unique=True))
        slots = [slot for slot in slots if self._length(slot) < LONGEST]
        if not slots:
            return
        self.steps += 1
        logits = torch.randn(len(slots), VOCAB, generator=torch.Generator().manual_seed(self.steps))
        chosen = choose(self.state, logits, [self._length(slot) for slot in range(SLOTS)], slots, padding=1)
        for row, (slot, token) in enumerate(zip(slots, chosen.tolist(), strict=True)):
            sampling, prompt, output = self.running[slot]
            expected = torch.tensor(expected_logits(logits[row], sampling, prompt, output, ENDS))
            if token < 0:
                assert (expected == -torch.inf).all()
                token = 0  # noqa: PLW2901 - the device continues with token 0
            elif sampling.temperature == 0 or sampling.top_k == 1:
                assert expected[token] >= expected.max() - 1e-4
            else:
                assert expected[token] > -torch.inf
            self.state.tokens[slot, self._length(slot)] = token
            needs = self.state.batch([slot], [self._length(each) for each in range(SLOTS)]).needs
            self.state.count(needs, torch.tensor([slot]), torch.tensor([token]))
            output.append(token)

    def _length(self, slot: int) -> int:
        _, prompt, output = self.running.get(slot, (None, [], [0]))
        return len(prompt) + len(output)

    @invariant()
    def counts_match_the_outputs(self) -> None:
        """Token counts of requests with penalties match their outputs, whatever their slots held before."""
        for slot, (sampling, _, output) in getattr(self, "running", {}).items():
            if (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != (
                0,
                0,
                1,
            ):
                counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=VOCAB)
                assert torch.equal(self.state.counts[slot].long(), counts)


Slots.TestCase.settings = machine(max_examples=40, stateful_step_count=40)
TestSlots = Slots.TestCase


def test_steps_reuse_their_memory() -> None:
    mix = [
        complete_params(seed=1, top_p=0.9, top_k=20, min_p=0.01, presence_penalty=1.0, logit_bias={3: 1.0}, bad_words=((1, 2),)),
        complete_params(seed=2, allowed_token_ids=range(50), min_tokens=5),
    ]  # fmt: skip
    state = make_state([request(slot, each) for slot, each in enumerate(mix)], VOCAB, ends=ENDS)
    workspace, shapes = state.workspace(2), set()
    where = {
        name: tensor.data_ptr() for name, tensor in vars(state).items() if isinstance(tensor, torch.Tensor)
    }
    for length in range(1, LONGEST):
        needs = state.batch([0, 1], [length, length]).needs
        shapes.add(needs)
        sample(state, needs, torch.randn(2, VOCAB), torch.arange(2), torch.full((2,), length))
    assert state.workspace(2) is workspace
    assert len(shapes) <= 3
    assert where == {name: getattr(state, name).data_ptr() for name in where}


def test_absent_parameters_are_off() -> None:
    state = make_state([request(0, common_pb2.SamplingParams())], VOCAB)
    values = (
        state.parameters.temperature,
        state.parameters.top_p,
        state.parameters.top_k,
        state.parameters.min_p,
        state.parameters.repetition,
        state.parameters.frequency,
        state.parameters.presence,
    )
    assert [float(each[0]) for each in values] == [1, 1, VOCAB, 0, 1, 0, 0]
    batch = state.batch([0], [1])
    assert batch.needs == SamplingOps(random=True)
    assert batch.logprobs == [None]


@pytest.mark.parametrize("temperature", [1e-38, 1e-6, 0.0])
def test_a_temperature_that_would_overflow_is_greedy(temperature: float) -> None:
    state = make_state([request(0, common_pb2.SamplingParams(temperature=temperature))], VOCAB)
    assert float(state.parameters.temperature[0]) == 0
    assert state.batch([0], [1]).needs == SamplingOps(greedy=True)


def test_tables_come_with_the_first_request_that_needs_them() -> None:
    """Tables have the size that the memory budget counts, and earlier requests are unaffected by them."""
    state = make_state([request(0, complete_params(temperature=0.0))], VOCAB, slots=3)
    assert not hasattr(state, "counts")
    admit(state, request(1, complete_params(temperature=0.0, presence_penalty=1.0), [4], [4]))
    tables = (state.counts, state.allowed, state.bias_ids, state.bias_values,
              state.ban_tokens, state.ban_until, state.ban_prefix, state.ban_prefix_len)  # fmt: skip
    assert sum(each.nbytes for each in tables) + thinking_bytes(3) == state_bytes(3, VOCAB)
    logits = torch.zeros(2, VOCAB)
    logits[:, 4] = 0.5
    assert choose(state, logits, [1, 2, 0], [0, 1]).tolist() == [4, 0]


@pytest.mark.parametrize(("vocab", "longest"), [(3000, 20_000), (20_001, 64)])
def test_a_step_fits_into_its_counted_memory(vocab: int, longest: int) -> None:
    """Every captured variant, and the log-probabilities, stay within the counted temporary memory."""
    rows = 8
    state = SamplingState(
        torch.zeros((rows + 1, longest + 1), dtype=torch.int64), SamplingVocabulary(vocab, (0,))
    )
    state.allocate()
    workspace = state.workspace(rows)
    arguments = torch.randn(rows, vocab), torch.arange(rows), torch.full((rows,), longest)
    counted = sampling_bytes(rows, vocab, longest) - rows * vocab * WORKSPACE_BYTES
    sample(state, state.variants()[-1], *arguments)  # allocates the persistent tensors
    known = [
        each
        for each in (*vars(state).values(), *vars(workspace).values(), *arguments)
        if isinstance(each, torch.Tensor)
    ]
    peaks = []
    for needs in state.variants():
        with LiveBytes(known) as live:
            sample(state, needs, *arguments)
        peaks.append(live.peak)
    with LiveBytes(known) as live:
        compute_logprobs(arguments[0], arguments[1])
    assert max(*peaks, live.peak) <= counted
    assert max(*peaks, live.peak) > counted / 2


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of live operator results; views add nothing."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._users: Counter[int] = Counter(each.untyped_storage().data_ptr() for each in known)
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                place, size = storage.data_ptr(), storage.nbytes()
                self.now += 0 if self._users[place] else size
                self._users[place] += 1
                weakref.finalize(tensor, self._release, place, size)
        self.peak = max(self.peak, self.now)
        return result

    def _release(self, place: int, size: int) -> None:
        self._users[place] -= 1
        self.now -= 0 if self._users[place] else size


def test_tables_hold_the_largest_allowed_requests() -> None:
    vocab = MAX_BANS + 1 + MAX_BIASES
    words = tuple((1,) * (MAX_BAN_TOKENS - 1) + (token,) for token in range(MAX_BANS))
    sampling = complete_params(
        temperature=0.0, logit_bias=dict.fromkeys(range(MAX_BANS + 1, vocab), -1.0), bad_words=words
    )
    state = make_state([request(0, sampling, [5], [1] * (MAX_BAN_TOKENS - 1))], vocab)
    logits = torch.zeros(1, vocab)
    logits[:, :MAX_BANS] = 9.0
    assert choose(state, logits, [MAX_BAN_TOKENS]).tolist() == [MAX_BANS]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only on a GPU does a copy block the host")
def test_an_admission_makes_no_blocking_copy() -> None:
    """Lists, penalties and counts reach a GPU in the order of its stream, while earlier steps run."""
    tokens = torch.zeros((3, LONGEST + 1), dtype=torch.int64, device="cuda")
    state = SamplingState(tokens, SamplingVocabulary(VOCAB, ENDS))
    full = complete_params(
        logit_bias={5: 1.5, 7: -2.0}, allowed_token_ids=(5, 7, 31, 63), bad_words=((1, 2), (3,)),
        min_tokens=4, presence_penalty=0.5, repetition_penalty=1.1,
    )  # fmt: skip
    state.allocate()
    torch.cuda.set_sync_debug_mode("error")
    try:
        state.set(request(0, full, [1, 2], [9, 9, 8]))
        state.set(request(0, complete_params(temperature=0.0)))
        state.set(request(1, full, [1, 2], [9, 9, 8]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    words = state.allowed[1].tolist()
    assert [token for token in range(VOCAB) if words[token // 32] >> token % 32 & 1] == [5, 7, 31, 63]
    assert state.bias_values[1, :2].tolist() == [1.5, -2.0]
    assert state.ban_tokens[1, :3].tolist() == [2, 3, 0]
    assert state.counts[1].nonzero()[:, 0].tolist() == [8, 9]


def test_a_worker_can_meet_every_request_that_validation_accepts() -> None:
    assert 2 * gateway.schemas.sampling.MAX_BAD_WORDS <= limits.MAX_BAD_WORDS
    sampling = common_pb2.SamplingParams(
        logit_bias=dict.fromkeys(range(limits.MAX_LOGIT_BIASES), 1.0), min_tokens=5,
        stop_token_ids=range(limits.MAX_STOP_TOKEN_IDS),
        bad_words=[common_pb2.TokenSequence(token_ids=range(limits.MAX_BAD_WORD_TOKENS))] * limits.MAX_BAD_WORDS,
    )  # fmt: skip
    check_fields(sampling)
    # A model has a handful of end tokens; these are more than any has.
    make_state([request(0, sampling)], 5000, ends=tuple(range(4000, 4256)))
