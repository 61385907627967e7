"""A request's parameters with their defaults, and a slot's row of them in contiguous memory."""

import struct
from dataclasses import dataclass

import torch

from protos.steps import Admission
from protos.triptych.v1 import common_pb2
from worker_svc.sampling.draw import sequence_seed

# Division of logits by a smaller temperature overflows float32. vLLM raises temperatures below 0.01 to 0.01;
# we apply them unchanged down to this value and sample greedily below it.
_GREEDY_BELOW = 1e-5

# A row: three int64, a float64 and five float32, padded to whole words.
_ROW = struct.Struct("=qqqdfffff4x")
_WORDS = struct.Struct(f"={_ROW.size // 8}q")


@dataclass(frozen=True)
class SlotParameters:
    """The parameters of each slot: columns of a tensor, so a single copy writes whole slots."""

    rows: torch.Tensor
    """int64 [slots, words]: the memory of all columns."""
    seed: torch.Tensor
    """int64 [slots]: the seed of the slot's sequence."""
    prompt_len: torch.Tensor
    """int64 [slots]."""
    top_k: torch.Tensor
    """int64 [slots]; the vocabulary's size turns the filter off."""
    top_p: torch.Tensor
    """float64 [slots]; 1 turns the filter off."""
    temperature: torch.Tensor
    """float32 [slots]; 0 is greedy."""
    min_p: torch.Tensor
    """float32 [slots]."""
    repetition: torch.Tensor
    """float32 [slots]."""
    frequency: torch.Tensor
    """float32 [slots]."""
    presence: torch.Tensor
    """float32 [slots]."""

    @classmethod
    def greedy(cls, num_slots: int, vocab_size: int, device: torch.device) -> "SlotParameters":
        """Returns slots that sample greedily, with everything else turned off."""
        row = _words(0, 0, vocab_size, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0)
        rows = torch.tensor(row, device=device).repeat(num_slots, 1)
        singles = rows.view(torch.float32)
        return cls(
            rows,
            seed=rows[:, 0],
            prompt_len=rows[:, 1],
            top_k=rows[:, 2],
            top_p=rows.view(torch.float64)[:, 3],
            temperature=singles[:, 8],
            min_p=singles[:, 9],
            repetition=singles[:, 10],
            frequency=singles[:, 11],
            presence=singles[:, 12],
        )


def row_of(request: Admission, vocab_size: int) -> tuple[int, ...]:
    """Returns a request's row of `SlotParameters.rows`."""
    sampling = request.sampling
    return _words(
        sequence_seed(sampling.seed, request.sequence),
        request.prompt_len,
        min(sampling.top_k, vocab_size) or vocab_size,
        top_p_of(sampling),
        temperature_of(sampling),
        # Thresholds are compared as bits, and -0.0 has the sign bit set.
        sampling.min_p or 0.0,
        repetition_of(sampling),
        sampling.frequency_penalty,
        sampling.presence_penalty,
    )


def temperature_of(sampling: common_pb2.SamplingParams) -> float:
    """Returns the temperature; 0 is greedy."""
    if not sampling.HasField("temperature"):
        return 1.0
    return sampling.temperature if sampling.temperature >= _GREEDY_BELOW else 0.0


def top_p_of(sampling: common_pb2.SamplingParams) -> float:
    """Returns `top_p`; 1 keeps every token."""
    return sampling.top_p if sampling.HasField("top_p") else 1.0


def repetition_of(sampling: common_pb2.SamplingParams) -> float:
    """Returns the repetition penalty; 1 is none."""
    return sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0


def _words(*values: float) -> tuple[int, ...]:
    return _WORDS.unpack(_ROW.pack(*values))
