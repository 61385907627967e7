"""When a sequence ends."""

import pytest

from protos.triptych.v1 import common_pb2
from scheduler_svc.requests.admission import Resumed
from scheduler_svc.requests.sampling import FinishReason, Sampling, StopRule
from tests.support.sampling_params import sampling_params
from tests.support.scheduler.factories import EOS, make_rig, make_submission

GRAMMAR = common_pb2.StructuredOutput(regex="a")
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("sampling", "received", "reason"),
    [
        (sampling_params(), [1, 5], None),
        (sampling_params(), [1, 5, 6, 7], LENGTH),
        (sampling_params(), [1, 2], STOP),
        (sampling_params(ignore_eos=True), [1, 2], None),
        (sampling_params(min_tokens=3), [1, 2], None),
        (sampling_params(stop_token_ids=[7]), [7], STOP),
        (sampling_params(min_tokens=3, structured_output=GRAMMAR), [1, 2], STOP),
        (sampling_params(ignore_eos=True, structured_output=GRAMMAR), [1, 2], STOP),
        (sampling_params(min_tokens=3, structured_output=GRAMMAR, stop_token_ids=[7]), [1, 7], None),
        (sampling_params(min_tokens=2, stop_token_ids=[7]), [1, 7], STOP),
        (sampling_params(), [1, 5, 6, 2], STOP),
        (sampling_params(), [], None),
    ],
)
def test_a_sequence_ends_at_its_stop_tokens_and_at_its_length(
    sampling: common_pb2.SamplingParams, received: list[int], reason: FinishReason | None
) -> None:
    """Before min_tokens, only a model's end token behind a finished grammar ends the sequence."""
    rule = StopRule.from_sampling(Sampling(sampling), frozenset({2}), max_tokens=4)
    assert rule.reason_of(received) is reason


@pytest.mark.parametrize(("resumed", "expected"), [([20, EOS], (STOP, EOS)), ([20, 21, 22], (LENGTH, None))])
def test_a_resumed_sequence_that_has_ended_gets_its_last_event_at_once(
    resumed: list[int], expected: tuple[FinishReason, int | None]
) -> None:
    """The connection broke between its last token and its finish reason: the scheduler runs nothing."""
    rig = make_rig()
    sink = rig.submit(make_submission(max_tokens=3, resumed=resumed))
    (event,) = sink.events
    assert (event.finish_reason, event.stop_token_id) == expected
    assert not event.token_ids
    assert not rig.step()


def test_the_other_sequences_of_a_resumed_request_go_on() -> None:
    """Only the sequence that has ended stays where it is."""
    rig = make_rig()
    parts = (Resumed(0, (20, EOS)), Resumed(1, (21,)))
    sink = rig.submit(make_submission(n=2, max_tokens=3, resumed_sequences=parts))
    rig.run()
    assert [event.finish_reason for event in sink.events if event.sequence == 0] == [STOP]
    assert len(sink.tokens_of(1)) == 2
