"""Ranks of a replica and contradictions between them. A replica on a single device is a group of one."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from protos.errors import ConfigurationRefused, TriptychError, Unavailable
from protos.triptych.v1 import worker_pb2_grpc
from protos.triptych.v1.registry_pb2 import RegisterEvent
from scheduler_svc.workers.descriptions import WorkerDescription, differing_fact

# Most ranks named in a message.
_MOST_NAMED = 8

# All facts about the model in which the ranks of a replica must agree.
_MODEL_FACTS = (
    "source", "architecture", "dtype", "vocab_size", "max_model_len", "eos_token_ids", "pool_tasks", "pooled_size",
)  # fmt: skip

# All facts about the device that determine static shapes.
_WORKER_FACTS = (
    "device", "groups", "limits", "default_max_num_seqs", "default_chunk", "default_block_size", "lora",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """How a model is split over the ranks of a replica."""

    tensor: int = 1
    """Ranks sharing each layer."""
    pipeline: int = 1
    """Stages, each with some of the layers."""
    expert_parallel: bool = False
    """Whether expert layers are split by experts instead of within each expert."""

    @property
    def world_size(self) -> int:
        """Ranks of the replica."""
        return self.tensor * self.pipeline

    @property
    def grammar_rank(self) -> int:
        """The rank for compiling grammars: the first of the last stage, which chooses the tokens."""
        return (self.pipeline - 1) * self.tensor


@dataclass(eq=False, slots=True)
class Rank:
    """A registered worker."""

    replica_id: str
    worker_id: str
    target: str
    """Host and port to dial."""
    number: int = 0
    """Pipeline rank * tensor-parallel size + tensor rank."""
    sizes: ParallelSizes = ParallelSizes()
    news: asyncio.Queue[RegisterEvent | TriptychError] = field(default_factory=asyncio.Queue)
    """Events for the worker, then the reason for the end of its registration."""
    stub: "worker_pb2_grpc.WorkerAsyncStub" = field(init=False)
    """The connection to the worker, set by the driver."""

    @property
    def name(self) -> str:
        """The rank for messages: `rank 1 of replica r0`, or `replica r0` of a replica on one device."""
        replica = f"replica {self.replica_id}"
        return f"rank {self.number} of {replica}" if self.sizes.world_size > 1 else replica

    def tell(self, state: RegisterEvent.State.ValueType, message: str) -> None:
        """Sends the worker an event."""
        self.news.put_nowait(RegisterEvent(state=state, message=message))

    def lost(self, cause: TriptychError) -> "ReplicaLost":
        """Returns the error of the replica if this rank fails."""
        return ReplicaLost(f"{self.name} is lost: {cause.message}", self.number, cause)


class ReplicaLost(Unavailable):
    """The replica is lost with a rank, or because its ranks belong to different groups."""

    def __init__(self, message: str, rank: int | None = None, cause: TriptychError | None = None) -> None:
        """Makes an error.

        Args:
            message: the reason for the other ranks.
            rank: the rank that is lost or leaves; None if all ranks must start again.
            cause: the reason for that rank.
        """
        super().__init__(message)
        self.rank = rank
        self.cause = cause

    def reason_for(self, rank: int) -> TriptychError:
        """Returns the reason for a rank: its own failure, or the loss of the replica."""
        return self.cause if self.cause is not None and self.rank == rank else self


def ranks_text(ranks: Iterable[int]) -> str:
    """Returns ranks for messages: `rank 1`, or `ranks 1, 3`, or the first eight `and 2 more`."""
    numbers = sorted(ranks)
    more = len(numbers) - _MOST_NAMED
    named = ", ".join(map(str, numbers[:_MOST_NAMED]))
    return f"rank{'s'[: len(numbers) > 1]} {named}{f' and {more} more' if more > 0 else ''}"


def check_sizes(new: Rank, other: Rank) -> None:
    """Compares the split of a replica according to two of its ranks.

    Raises:
        ConfigurationRefused: names the first difference.
    """
    for flag, size in (("--tensor-parallel-size", "tensor"), ("--pipeline-parallel-size", "pipeline")):
        ours, theirs = getattr(new.sizes, size), getattr(other.sizes, size)
        if ours != theirs:
            raise ConfigurationRefused(
                f"rank {new.number} of replica {new.replica_id} says {flag} {ours} and rank {other.number} says {theirs}; "
                "start all ranks of a replica with the same sizes"
            )
    if new.sizes.expert_parallel != other.sizes.expert_parallel:
        having, lacking = (new, other) if new.sizes.expert_parallel else (other, new)
        raise ConfigurationRefused(
            f"rank {having.number} of replica {new.replica_id} says --enable-expert-parallel and rank {lacking.number} does not; "
            "start all ranks of a replica with the same flags"
        )


def differing_rank(descriptions: list[WorkerDescription]) -> tuple[int, str] | None:
    """Returns the first rank with another model or device than rank 0, and the difference."""
    first = descriptions[0]
    for rank, other in enumerate(descriptions):
        difference = differing_fact(first.model, other.model, _MODEL_FACTS) or differing_fact(
            first, other, _WORKER_FACTS
        )
        if difference is not None:
            fact, ours, theirs = difference
            return rank, f"has {fact} {theirs} and rank 0 has {ours}"
    return None
