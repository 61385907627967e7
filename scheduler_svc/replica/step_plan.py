"""One step, as decided: what a worker is told and what it answers. No protocol types; ``convert`` translates."""

from collections.abc import Sequence
from dataclasses import dataclass

from protos.errors import TriptychError
from scheduler_svc.requests.request import Logprobs, Pooling
from scheduler_svc.requests.sampling import SamplingParams
from scheduler_svc.shapes.pool_shapes import PoolShape


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A device-to-device copy of a block's leading ``num_tokens`` tokens."""

    group_id: int
    source_block: int
    target_block: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that gets a slot: everything the worker will ever be told about it, but for later blocks.

    Attributes:
        token_ids: all tokens known so far; the worker prefills those behind ``num_computed``.
        block_ids: block table per KV group.
        pooling: for a pooling model, what is made of the result.
        sequence: which of the client's request's sequences it is; mixed into the random numbers.
    """

    slot: int
    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_computed: int
    sampling: SamplingParams
    block_ids: tuple[tuple[int, ...], ...]
    pooling: Pooling | None = None
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Growth:
    """Blocks appended to a slot's table of one group."""

    slot: int
    group_id: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prefill:
    """One chunk of one request, at batch size 1.

    Attributes:
        start: position of the first token.
        num_tokens: real tokens; the graph's chunk is padded beyond them.
        sample: whether the known tokens end here, so that a next one is sampled.
    """

    slot: int
    start: int
    num_tokens: int
    sample: bool


@dataclass(frozen=True, slots=True)
class Decode:
    """One token for each of these slots, at a compiled batch size.

    Attributes:
        lease: so many such steps in a row, each at the positions behind the last one's, may be run before another plan comes.
    """

    slots: tuple[int, ...]
    positions: tuple[int, ...]
    bucket: int
    lease: int = 1


@dataclass(frozen=True, slots=True)
class Pool:
    """All tokens of each of these slots, in one static shape of a pooling model."""

    slots: tuple[int, ...]
    shape: PoolShape


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One graph execution and the bookkeeping before it, in the order in which a worker applies it.

    Attributes:
        step: number on this replica's stream, from 1.
        release: slots whose request is over.
    """

    step: int
    work: Prefill | Decode | Pool | None
    release: tuple[int, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    admit: tuple[Admission, ...] = ()
    grow: tuple[Growth, ...] = ()


@dataclass(frozen=True, slots=True)
class SlotOutput:
    """What one slot produced in a step.

    Attributes:
        prompt_logprobs: if asked for, one per prompt token that a token of the step's chunk is followed by.
    """

    slot: int
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()
    error: TriptychError | None = None
    pooled: Sequence[float] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """A worker's answer to one plan, or to one of the steps that it leased.

    Attributes:
        token_ids: the sampled token of each slot of the plan's work, in its order, if that is all there is to say.
        outputs: otherwise, what there is to say slot by slot; also of admissions that failed.
        error: the whole step failed; there are no outputs, and the KV of its slots is not to be trusted.
        last: whether this is the plan's last result; one that leases several steps has a result for each that was run.
    """

    step: int
    token_ids: Sequence[int] = ()
    outputs: tuple[SlotOutput, ...] = ()
    error: TriptychError | None = None
    last: bool = True
