"""Step plans, which the scheduler sends, and step results, which the worker returns.

Both services use these types. :mod:`protos.step_messages` translates them to and from the messages of
``worker.proto``. Sampling parameters, pooling parameters, log-probabilities and reports stay messages.
"""

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from protos.errors import TriptychError
from protos.triptych.v1 import common_pb2, worker_pb2


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A device-to-device copy of a block."""

    group_id: int
    source_block: int
    target_block: int
    num_tokens: int
    """Leading tokens of the block to copy; copying more does no harm."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Gives a request a slot. Later plans name the slot only."""

    slot: int
    token_ids: Sequence[int]
    """All known tokens: the prompt, and after a preemption or a lost worker also the sampled tokens."""
    num_computed_tokens: int
    """Leading tokens with keys and values in the blocks."""
    sampling: common_pb2.SamplingParams
    blocks: Mapping[int, Sequence[int]]
    """First block ids, by KV group. The null block stands for blocks before a paged window."""
    request_id: str = ""
    """For logs."""
    sequence: int = 0
    """Index of the sequence within its request; its random numbers depend on it."""
    num_prompt_tokens: int | None = None
    """How many of ``token_ids`` are the prompt; None for all."""
    pooling: common_pb2.PoolingParams | None = None
    """Set for a pooling model, which ignores ``sampling`` and ``blocks``."""
    adapter_id: int = 0
    """The load of the request's LoRA adapter on the worker; 0 for the base model."""
    traceparent: str = ""
    """The span that the worker's spans of the request belong to; empty: it is not traced."""

    @property
    def prompt_len(self) -> int:
        """Length of the prompt, tokens."""
        return len(self.token_ids) if self.num_prompt_tokens is None else self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Growth:
    """Blocks appended to a slot's table of a KV group."""

    slot: int
    group_id: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Prefill:
    """A chunk of a request, at batch size 1."""

    slot: int
    start: int
    """Position of the chunk's first token; equals the slot's computed tokens."""
    num_tokens: int
    """Real tokens; the rest of the bucket is padding."""
    sample: bool
    """Whether this is the last chunk of the known tokens: the worker samples the next token."""
    bucket: int = 0
    """Tokens of the graph; 0 for the largest."""


@dataclass(frozen=True, slots=True)
class Decode:
    """A token for each of some slots, up to ``steps`` times in a row, at a compiled batch size."""

    slots: Sequence[int]
    bucket: int
    """Rows of the graph; at least the number of slots."""
    steps: int = 1
    """Most steps; the slots have blocks for all of them."""
    steps_per_result: int = 1
    """Steps that share a result, unless the work ends."""


@dataclass(frozen=True, slots=True, order=True)
class PoolShape:
    """A static shape of a pooling model. Ordered by prompt length, then by texts."""

    prompt_len: int
    """Tokens of each row; of a packed shape all tokens."""
    batch: int
    """Rows; of a packed shape the most texts."""
    packed: bool = False
    """Whether texts are packed without padding between them. Otherwise each takes a row."""

    @property
    def num_tokens(self) -> int:
        """Tokens that a step computes, padding included."""
        return self.prompt_len if self.packed else self.batch * self.prompt_len

    def __str__(self) -> str:
        return f"{self.batch}{'/' if self.packed else 'x'}{self.prompt_len}"


def format_shapes(shapes: Sequence[PoolShape]) -> str:
    """Returns the shapes as text: "1x64, 4x64 (rows x tokens)", or "2/8, 4/16 (texts / tokens)"."""
    unit = "texts / tokens" if any(shape.packed for shape in shapes) else "rows x tokens"
    return f"{', '.join(map(str, shapes))} ({unit})"


@dataclass(frozen=True, slots=True)
class Pool:
    """All tokens of some slots, in a static shape of a pooling model."""

    slots: Sequence[int]
    shape: PoolShape
    """At least a row per slot, and no slot longer than a row. A packed shape holds at least the tokens of
    all slots together.
    """


Work = Prefill | Decode | Pool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a worker does next, in its order of application: release, copy, admit, grow, the work.

    Valid whatever became of the plans before it: a slot whose admission was refused, or whose step failed, is
    dead until it is released, and what names it is skipped for that slot alone.
    """

    step: int
    """Number of the plan on its stream, from 1."""
    work: Work | None = None
    release: Sequence[int] = ()
    """Slots to free."""
    copies: Sequence[BlockCopy] = ()
    admit: Sequence[Admission] = ()
    grow: Sequence[Growth] = ()
    interrupts: bool = False
    """Whether it ends earlier decode work after the running step."""
    context_tokens: int = 0
    """Tokens that the first step attends to, for the scheduler's own use: not sent."""


@dataclass(frozen=True, slots=True)
class SlotOutput:
    """The output of a step for a slot."""

    slot: int
    token_ids: Sequence[int] = ()
    """The sampled token, then the tokens forced by the request's grammar."""
    logprobs: Sequence[common_pb2.TokenLogprobs] = ()
    """Per token, if requested."""
    prompt_logprobs: Sequence[common_pb2.TokenLogprobs] = ()
    """For each prompt token after a token of the step's chunk, if requested."""
    error: TriptychError | None = None
    """This slot alone failed; it has no tokens."""
    pooled: Sequence[float] = ()
    """Result of a pooling model, row-major."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """A worker's answer to a plan, or to some of its steps."""

    step: int
    token_ids: Sequence[int] = ()
    """The common case, without outputs: for each step a sampled token for each slot of the plan's work, in
    its order."""
    outputs: Sequence[SlotOutput] = ()
    """Every other case, by slot; includes refused admissions. A slot without output was skipped."""
    error: TriptychError | None = None
    """The whole step failed: there are no outputs, and the KV of its slots is undefined."""
    last: bool = True
    """Whether this is the plan's last result."""
    num_steps: int = 1
    """Steps that ran since the result before; 0 if the plan has no work, or all of it was skipped."""
    execute_us: int = 0
    """Time that its steps took on the worker, microseconds."""
    report: worker_pb2.WorkerReport | None = None
    """The worker's counts; set about once a second."""


def slots_of(work: Work | None) -> Sequence[int]:
    """Returns the slots that a plan's work runs, in its order."""
    if work is None:
        return ()
    return (work.slot,) if isinstance(work, Prefill) else work.slots


def without_slots(work: Work | None, slots: Collection[int]) -> Work | None:
    """Returns the step's work without some slots; `None` if nothing is left. A bucket keeps its size."""
    left = [slot for slot in slots_of(work) if slot not in slots]
    if work is None or len(left) == len(slots_of(work)):
        return work
    return replace(work, slots=left) if left and not isinstance(work, Prefill) else None


class GroupKind(enum.Enum):
    """How a group of layers uses KV memory."""

    FULL = "full"
    """Every token is kept, in paged blocks."""
    PAGED_WINDOW = "paged_window"
    """Append-only paged blocks; blocks before the window may be freed."""
    IN_PLACE_WINDOW = "in_place_window"
    """A block per request with the tokens of a window, oldest first, which slide with every step."""


def kind_to_proto(kind: GroupKind) -> common_pb2.KvGroupKind.ValueType:
    """Returns a kind's value in messages."""
    return common_pb2.KvGroupKind.Value(f"KV_GROUP_KIND_{kind.name}")


def kind_from_proto(value: common_pb2.KvGroupKind.ValueType) -> GroupKind | None:
    """Returns the kind of a message's value; None if this release does not know it."""
    return next((kind for kind in GroupKind if kind_to_proto(kind) == value), None)
