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
    """Whether the chunk ends the known tokens, so that the worker samples the next one."""
    bucket: int = 0
    """Tokens of the graph; 0 for the largest."""


@dataclass(frozen=True, slots=True)
class Decode:
    """A token for each of some slots, at a compiled batch size."""

    slots: Sequence[int]
    positions: Sequence[int]
    """Position of each slot's input token; equals the slot's computed tokens."""
    bucket: int
    """Rows of the graph; at least the number of slots."""
    lease: int = 1
    """Consecutive steps, each a position further, before the worker needs the next plan."""

    def next(self) -> "Decode":
        """Returns the following step of the lease."""
        return replace(self, positions=[position + 1 for position in self.positions])


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
    """A step, in the worker's order of application: release, copy, place, admit, grow, the work."""

    step: int
    """Number of the plan on its stream, from 1."""
    work: Work | None = None
    release: Sequence[int] = ()
    """Slots to free."""
    copies: Sequence[BlockCopy] = ()
    admit: Sequence[Admission] = ()
    grow: Sequence[Growth] = ()
    continues: bool = False
    """Whether the work goes on where the plan before it ends, and runs only if that plan ran whole."""


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
    """A worker's answer to a plan, or to a step of the plan's lease."""

    step: int
    token_ids: Sequence[int] = ()
    """The common case, without outputs: a sampled token for each slot of the plan's work, in its order."""
    outputs: Sequence[SlotOutput] = ()
    """Every other case, by slot; includes failed admissions."""
    error: TriptychError | None = None
    """The whole step failed: there are no outputs, and the KV of its slots is undefined."""
    last: bool = True
    """Whether this is the plan's last result."""
    lease_index: int = 0
    """Index of the step within the plan's lease, from 0."""
    execute_us: int = 0
    """Time that the step took on the worker, microseconds."""
    void: bool = False
    """Whether the work of a plan that continues another did not run."""
    report: worker_pb2.WorkerReport | None = None
    """The worker's counts; set about once a second."""


def slots_of(work: Work | None) -> Sequence[int]:
    """Returns the slots that a plan's work runs, in its order."""
    if work is None:
        return ()
    return (work.slot,) if isinstance(work, Prefill) else work.slots


def without_slots(work: Prefill | Decode | None, slots: Collection[int]) -> Prefill | Decode | None:
    """Returns the step's work without some slots; `None` if nothing is left. A bucket keeps its size."""
    if isinstance(work, Prefill):
        return None if work.slot in slots else work
    if not isinstance(work, Decode) or not slots:
        return work
    left = [pair for pair in zip(work.slots, work.positions, strict=True) if pair[0] not in slots]
    if len(left) == len(work.slots):
        return work
    if not left:
        return None
    return replace(work, slots=[slot for slot, _ in left], positions=[position for _, position in left])


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
