"""Which part of a model a rank has."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RankLayout:
    """A rank's place in its replica.

    Ranks are numbered stage by stage: pipeline stage times `tensor`, plus the rank within the stage.
    """

    rank: int = 0
    """0 to `world_size` - 1."""
    tensor: int = 1
    """Ranks of a stage, which split every layer."""
    pipeline: int = 1
    """Stages, which split the model by layers."""
    experts: bool = False
    """Whether the ranks of a stage split expert layers by experts instead of within each expert."""

    @property
    def world_size(self) -> int:
        """Ranks of the replica."""
        return self.tensor * self.pipeline

    @property
    def stage(self) -> int:
        """This rank's stage, from 0."""
        return self.rank // self.tensor

    @property
    def tensor_rank(self) -> int:
        """This rank's place within its stage, from 0."""
        return self.rank % self.tensor

    @property
    def peers(self) -> tuple[int, ...]:
        """All ranks of this rank's stage, itself included."""
        return self.ranks_of(self.stage)

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """Returns the ranks of a stage."""
        return tuple(range(stage * self.tensor, (stage + 1) * self.tensor))

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds tokens."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes logits."""
        return self.stage == self.pipeline - 1

    @property
    def chooser(self) -> int:
        """The first rank of the last stage.

        It chooses tokens where ranks cannot choose alike, and reports them to the other stages.
        """
        return self.world_size - self.tensor

    @property
    def leads(self) -> bool:
        """Whether this rank takes plans from the scheduler and announces steps to the others."""
        return self.rank == 0

    @property
    def chooses(self) -> bool:
        """Whether this rank is the chooser."""
        return self.rank == self.chooser

    def __str__(self) -> str:
        """Describes the layout for people and for the keys of compiled code."""
        experts = ", experts split" if self.experts else ""
        return f"rank {self.rank} of {self.tensor} x {self.pipeline}{experts}"
