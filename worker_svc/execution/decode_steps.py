"""Decode steps, one a bucket: from a step's rows to logits, tokens and what is told of them, captured where the device captures."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from worker_svc.devices.base import Device
from worker_svc.execution.batch import Batch
from worker_svc.execution.token_selection import Report, Sample
from worker_svc.sampling.argmax import argmax_rows
from worker_svc.sampling.logprobs import compute_logprobs
from worker_svc.sampling.sampler import sample
from worker_svc.sampling.state import Needs

Forward = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Of rows, int64 [bucket]: logits, float32 [bucket, vocab], and the rows' positions, int64 [bucket]."""


@dataclass(frozen=True)
class DecodeStep:
    """What a step of one bucket is put together from."""

    forward: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
    """What ``Forward`` does. A captured one returns the most probable tokens, int64 [bucket], besides: they cost it no launch."""
    advance: Callable[..., tuple[torch.Tensor, ...]]
    """Of rows and the tokens chosen for them, int64 [bucket]."""
    sample: Sample
    """Chooses the tokens where not every row is known to take the most probable one."""
    report: Report
    """The rows' log-probabilities."""


def sampler(batch: Batch) -> Sample:
    """Samples for the slots of a batch."""

    def choose(
        needs: Needs, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return sample(batch.sampling, needs, logits, rows, positions + 1)

    return choose


def decode_step(batch: Batch, forward: Forward) -> DecodeStep:
    """A step that runs as it is written."""
    return DecodeStep(forward, _advance(batch), sampler(batch), compute_logprobs)


def captured_step(device: Device, batch: Batch, forward: Forward, padding: torch.Tensor) -> DecodeStep:
    """The same, captured in parts.

    Args:
        device: one that captures.
        batch: with its tables allocated and its scratch as large as it will be: the parts hold their addresses.
        forward: the model's.
        padding: rows to capture on, int64 [bucket], all of them padding.
    """

    def forward_and_choose(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits, positions = forward(rows)
        return logits, positions, argmax_rows(logits)

    captured = device.capture(forward_and_choose, [padding])
    # What is captured behind it reads its results where they are.
    logits, positions, tokens = captured(padding)
    reporting = device.capture(lambda tokens: (compute_logprobs(logits, tokens),), [tokens])

    def report_of(given: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        # Not of logits that a grammar's mask lies on, where the step's own are: who has one brings a copy from before.
        return reporting(tokens)[0] if given is logits else compute_logprobs(given, tokens)

    return DecodeStep(
        captured,
        device.capture(_advance(batch), [padding, tokens]),
        _captured_sampler(device, batch, logits, padding, positions),
        report_of,
    )


def _captured_sampler(
    device: Device, batch: Batch, logits: torch.Tensor, padding: torch.Tensor, positions: torch.Tensor
) -> Sample:
    """The kinds of sampling that steps may need, each captured: few, that each compute more than most steps need."""
    choose, captured = sampler(batch), []
    for needs in batch.sampling.variants():

        def choose_so(rows: torch.Tensor, needs: Needs = needs) -> tuple[torch.Tensor, ...]:
            return choose(needs, logits, rows, positions)

        captured.append((needs, device.capture(choose_so, [padding])))

    def sample_captured(
        needs: Needs, _: torch.Tensor, rows: torch.Tensor, __: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return next(each for kind, each in captured if kind.covers(needs))(rows)

    return sample_captured


def _advance(batch: Batch) -> Callable[..., tuple[torch.Tensor, ...]]:
    def advance(rows: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch.advance_rows(rows, chosen)
        return ()

    return advance
