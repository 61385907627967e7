"""The static shapes of a deployment: everything that compiled graphs and block tables are sized by, checked once."""

from dataclasses import dataclass

from protos.errors import ConfigurationRefused


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What a worker said it can run (``Worker.Describe``).

    Attributes:
        max_context: longest context the model was made for, tokens.
        block_size_multiple: a block must be a multiple of this many tokens.
        max_batch: rows of a decode step at most.
        max_chunk: tokens of a prefill step at most.
    """

    max_context: int
    block_size_multiple: int
    max_batch: int
    max_chunk: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """One deployment's static shapes.

    Attributes:
        max_model_len: longest sequence (prompt plus output), tokens.
        max_num_seqs: slots of a replica.
        chunk: tokens of one prefill step.
        block_size: tokens of one KV block, the same in all groups.
        buckets: decode batch sizes, ascending.
    """

    max_model_len: int
    max_num_seqs: int
    chunk: int
    block_size: int
    buckets: tuple[int, ...]

    def check(self, limits: DeviceLimits) -> None:
        """Verifies the rules that hold between these numbers and the device.

        Raises:
            ConfigurationRefused: with the first rule that is broken and the setting to change.
        """
        rules = (
            (self.max_model_len <= limits.max_context,
             f"max_model_len {self.max_model_len} exceeds the model's context of {limits.max_context} tokens"),
            (self.block_size % limits.block_size_multiple == 0,
             f"block_size {self.block_size} must be a multiple of {limits.block_size_multiple} on this device"),
            (self.block_size % self.chunk == 0 or self.chunk % self.block_size == 0,
             f"max_num_batched_tokens {self.chunk} (the prefill chunk) and block_size {self.block_size} must divide one another"),
            (self.chunk <= limits.max_chunk,
             f"max_num_batched_tokens {self.chunk} (the prefill chunk) exceeds this device's limit of {limits.max_chunk}"),
            (self.max_num_seqs <= limits.max_batch,
             f"max_num_seqs {self.max_num_seqs} exceeds this device's limit of {limits.max_batch}"),
            (self.buckets[-1] >= self.max_num_seqs,
             f"the largest decode bucket {self.buckets[-1]} is smaller than max_num_seqs {self.max_num_seqs}"),
        )  # fmt: skip
        for holds, broken in rules:
            if not holds:
                raise ConfigurationRefused(broken)
