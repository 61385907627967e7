"""The ranks of a replica: what each says of itself, and how they may contradict one another."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from protos.errors import ConfigurationRefused, TriptychError, Unavailable
from scheduler_svc.workers.descriptions import ModelDescription, WorkerDescription

# Facts about the model in which the ranks of a replica must agree.
_MODEL_FACTS = (
    "source", "architecture", "dtype", "vocab_size", "max_model_len", "eos_token_ids", "pool_tasks", "pooled_size",
)  # fmt: skip
# Ranks that a message names.
_MOST_NAMED = 8

# What the static shapes depend on.
_WORKER_FACTS = (
    "device",
    "groups",
    "limits",
    "default_max_num_seqs",
    "default_chunk",
    "default_block_size",
    "lora",
)


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """How a model is split over the ranks of a replica."""

    tensor: int = 1
    """Ranks that share each layer."""
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
        """The rank that compiles grammars: the first one of the last stage, which chooses the tokens."""
        return (self.pipeline - 1) * self.tensor


@dataclass(frozen=True, slots=True)
class RankAddress:
    """A registered worker: its place in a replica, and where it listens."""

    replica_id: str
    worker_id: str
    target: str
    """Host and port to dial."""
    rank: int = 0
    """Pipeline rank * tensor-parallel size + tensor rank."""
    sizes: ParallelSizes = ParallelSizes()

    @property
    def name(self) -> str:
        """The rank for messages: `rank 1 of replica r0`, or `replica r0` if that has no other ranks."""
        return rank_name(self.replica_id, self.rank, self.sizes)


class ReplicaLost(Unavailable):
    """The replica is lost with one of its ranks, or because its ranks belong to different groups."""

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


def rank_name(replica_id: str, rank: int, sizes: ParallelSizes) -> str:
    """Returns the name of a rank for messages; see :attr:`RankAddress.name`."""
    return f"rank {rank} of replica {replica_id}" if sizes.world_size > 1 else f"replica {replica_id}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Returns ranks for messages: `rank 1`, or `ranks 1, 3`, or the first eight `and 2 more`."""
    numbers = sorted(ranks)
    more = len(numbers) - _MOST_NAMED
    named = ", ".join(map(str, numbers[:_MOST_NAMED]))
    return f"rank{'s'[: len(numbers) > 1]} {named}{f' and {more} more' if more > 0 else ''}"


def check_sizes(new: RankAddress, other: RankAddress) -> None:
    """Checks that two ranks of one replica say the same about its split.

    Raises:
        ConfigurationRefused: they do not; names the first difference.
    """
    for flag, field in (("--tensor-parallel-size", "tensor"), ("--pipeline-parallel-size", "pipeline")):
        ours, theirs = getattr(new.sizes, field), getattr(other.sizes, field)
        if ours != theirs:
            raise ConfigurationRefused(
                f"rank {new.rank} of replica {new.replica_id} says {flag} {ours} and rank {other.rank} says {theirs}; "
                "start all ranks of a replica with the same sizes"
            )
    if new.sizes.expert_parallel != other.sizes.expert_parallel:
        having, lacking = (new, other) if new.sizes.expert_parallel else (other, new)
        raise ConfigurationRefused(
            f"rank {having.rank} of replica {new.replica_id} says --enable-expert-parallel and rank {lacking.rank} does not; "
            "start all ranks of a replica with the same flags"
        )


def differing_rank(descriptions: list[WorkerDescription]) -> tuple[int, str] | None:
    """Returns the first rank that describes another model or device than rank 0, and the difference.

    Args:
        descriptions: the ranks' answers to Describe, by rank.
    """
    first = dict(_facts(descriptions[0]))
    for rank, description in enumerate(descriptions):
        for fact, value in _facts(description):
            if value != first[fact]:
                return rank, f"has {fact} {_text(value)} and rank 0 has {_text(first[fact])}"
    return None


def _facts(description: WorkerDescription) -> Iterator[tuple[str, object]]:
    model: ModelDescription = description.model
    yield from ((name, getattr(model, name)) for name in _MODEL_FACTS)
    yield from ((name, getattr(description, name)) for name in _WORKER_FACTS)


def _text(value: object) -> str:
    return str(sorted(value)) if isinstance(value, frozenset) else str(value)
