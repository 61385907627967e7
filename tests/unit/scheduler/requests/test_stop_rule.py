"""The one rule for when a sequence ends."""

from dataclasses import replace

import pytest

from scheduler_svc.requests.request import FinishReason, Request
from scheduler_svc.requests.sampling import Grammar
from scheduler_svc.requests.stop_rule import finish_reason, is_full, stop_ids
from tests.support.scheduler.factories import EOS, make_request, make_sampling

STOP = 50
GRAMMAR = Grammar(b"g")


def request_with(
    *output: int, min_tokens: int = 0, grammar: bool = False, ignore_eos: bool = False
) -> Request:
    """A request with these output tokens, at most 4, and a stop token beside the end token."""
    sampling = make_sampling(
        max_tokens=4, stop_token_ids=[STOP], min_tokens=min_tokens, ignore_eos=ignore_eos
    )
    request = make_request(sampling=replace(sampling, grammar=GRAMMAR if grammar else None))
    request.stop_ids = stop_ids(request.sampling, frozenset({EOS}))
    request.end_ids = frozenset({EOS})
    request.token_ids += output
    return request


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ((7,), None),
        ((7, STOP), FinishReason.STOP),
        ((7, EOS), FinishReason.STOP),
        ((7, 7, 7, 7), FinishReason.LENGTH),
        ((7, 7, 7, STOP), FinishReason.STOP),
    ],
)
def test_a_sequence_ends_at_a_stop_token_or_its_length(
    output: tuple[int, ...], reason: FinishReason | None
) -> None:
    """A stop token at the last position counts as a stop."""
    assert finish_reason(request_with(*output), output[-1]) is reason


def test_a_stop_token_before_the_minimum_does_not_end_a_sequence() -> None:
    """Output of one token ends only if the minimum is at most one."""
    reasons = [finish_reason(request_with(STOP, min_tokens=least), STOP) for least in (0, 1, 2)]
    assert reasons == [FinishReason.STOP, FinishReason.STOP, None]


def test_a_completed_grammar_ends_a_sequence_before_the_minimum() -> None:
    """Only the model's end token tells that the grammar is complete; a stop token must still wait."""
    early = [finish_reason(request_with(token, min_tokens=3, grammar=True), token) for token in (EOS, STOP)]
    assert early == [FinishReason.STOP, None]


def test_ignored_end_tokens_do_not_end_a_sequence() -> None:
    """A grammar overrules ``ignore_eos``: nothing can follow a completed grammar."""
    ends = [
        finish_reason(request_with(EOS, ignore_eos=True, grammar=grammar), EOS) for grammar in (False, True)
    ]
    assert ends == [None, FinishReason.STOP]


def test_a_resumed_sequence_with_all_its_tokens_is_full() -> None:
    """It is full at its limit and above."""
    assert [is_full(count, 4) for count in (3, 4, 5)] == [False, True, True]
