"""The decode step of each bucket: rows to logits, tokens and log-probabilities, captured if possible."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from worker_svc.devices.base import Device
from worker_svc.execution.batch import Batch
from worker_svc.execution.token_selection import ComputeLogprobs, Sample
from worker_svc.sampling.argmax import argmax_rows
from worker_svc.sampling.logprobs import compute_logprobs
from worker_svc.sampling.sampler import sample
from worker_svc.sampling.state import Needs

Forward = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Takes rows, int64 [bucket]; returns logits, float32 [bucket, vocab], and the rows' positions, int64
[bucket]."""


@dataclass(frozen=True)
class DecodeStep:
    """The parts of one bucket's step."""

    forward: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
    """A `Forward`. A captured one also returns the most probable tokens, int64 [bucket], at no extra
    launch."""
    advance: Callable[..., tuple[torch.Tensor, ...]]
    """Takes rows and their new tokens, int64 [bucket]; records the tokens in the batch."""
    sample: Sample
    """Samples tokens for steps in which some row may not take the most probable one."""
    compute_logprobs: ComputeLogprobs
    """Computes the rows' log-probabilities."""


def make_sampler(batch: Batch) -> Sample:
    """Returns a function that samples for the slots of a batch."""

    def sample_rows(
        needs: Needs, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return sample(batch.sampling, needs, logits, rows, positions + 1)

    return sample_rows


def plain_step(batch: Batch, forward: Forward) -> DecodeStep:
    """Returns a step that runs operator by operator."""
    return DecodeStep(forward, _make_advance(batch), make_sampler(batch), compute_logprobs)


def captured_step(device: Device, batch: Batch, forward: Forward, padding: torch.Tensor) -> DecodeStep:
    """Returns a step whose parts the device has captured.

    Args:
        device: a device that captures.
        batch: with its tables allocated and its workspace at full size: captured parts hold their addresses.
        forward: runs the model.
        padding: rows to capture on, int64 [bucket], all of them padding.
    """

    def forward_and_argmax(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits, positions = forward(rows)
        return logits, positions, argmax_rows(logits)

    captured = device.capture(forward_and_argmax, [padding])
    # The parts captured below read these results in place.
    logits, positions, tokens = captured(padding)
    captured_logprobs = device.capture(lambda tokens: (compute_logprobs(logits, tokens),), [tokens])

    def compute(given: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        # A grammar masks the step's own logits in place, so its caller passes a copy made before.
        return captured_logprobs(tokens)[0] if given is logits else compute_logprobs(given, tokens)

    return DecodeStep(
        captured,
        device.capture(_make_advance(batch), [padding, tokens]),
        _captured_sampler(device, batch, logits, padding, positions),
        compute,
    )


def _captured_sampler(
    device: Device, batch: Batch, logits: torch.Tensor, padding: torch.Tensor, positions: torch.Tensor
) -> Sample:
    """Captures a few variants of sampling. Each step runs the cheapest variant that covers its needs."""
    sample_rows, captured = make_sampler(batch), []
    for needs in batch.sampling.variants():

        def sample_variant(rows: torch.Tensor, needs: Needs = needs) -> tuple[torch.Tensor, ...]:
            return sample_rows(needs, logits, rows, positions)

        captured.append((needs, device.capture(sample_variant, [padding])))

    def sample_captured(
        needs: Needs, _: torch.Tensor, rows: torch.Tensor, __: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return next(variant for covered, variant in captured if covered.covers(needs))(rows)

    return sample_captured


def _make_advance(batch: Batch) -> Callable[..., tuple[torch.Tensor, ...]]:
    def advance(rows: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch.advance_rows(rows, tokens)
        return ()

    return advance
