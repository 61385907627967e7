"""The persistent batch: the state of every slot, as tensors on the device."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from protos.errors import Internal
from protos.steps import Admission, Decode, GroupKind, Growth, Prefill, Work
from protos.validation import check_token_ids
from worker_svc.devices.attention import InPlaceInput, PagedInput, StepInput
from worker_svc.devices.base import takes_page_locked, upload
from worker_svc.devices.lora_stack import NO_ADAPTER
from worker_svc.sampling.state import SamplingBatch, SamplingState, SamplingVocabulary
from worker_svc.shapes import NULL_BLOCK, KvGroup, ShapeConfig


class StagedWrites:
    """Collects the writes of a plan's admissions, which travel to the device in a single copy.

    A copy costs host and device about the same for a word as for thousands.
    """

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        """Starts empty. The targets are contiguous tensors of int32 or int64 on one device."""
        self._targets = [target.view(-1) for target in targets]
        self._device = targets[0].device
        # By slot: each write's target, its first place in the flat target, and its words.
        self._staged: dict[int, list[tuple[int, int, Sequence[int]]]] = {}

    def add(self, slot: int, target: int, place: int, words: Sequence[int]) -> None:
        """Stages words for places of a flat target; staged writes do not overlap."""
        self._staged.setdefault(slot, []).append((target, place, words))

    def drop(self, slot: int) -> None:
        """Forgets the staged writes of a slot."""
        self._staged.pop(slot, None)

    def copy(self) -> None:
        """Performs the staged writes in the order of the device's stream, without waiting for it."""
        if not self._staged:
            return
        writes = sorted(
            (write for staged in self._staged.values() for write in staged), key=lambda one: one[0]
        )
        self._staged.clear()
        places = [torch.arange(place, place + len(words)) for _, place, words in writes]
        values = [torch.tensor(words, dtype=torch.int64) for _, _, words in writes]
        host = torch.cat([*places, *values])
        if takes_page_locked(self._device):
            # The allocator keeps the memory until the copy is done.
            host = host.pin_memory()
        on_device = host.to(self._device, non_blocking=True).view(2, -1)
        start = 0
        for number, target in enumerate(self._targets):
            end = start + sum(len(words) for index, _, words in writes if index == number)
            if end > start:
                target.index_copy_(0, on_device[0, start:end], on_device[1, start:end].to(target.dtype))
            start = end


# The tensors that admissions write, by their index in `StagedWrites`; a table for each group follows.
_TOKENS, _COMPUTED, _ADAPTERS, _PARAMETERS, _TABLES = range(5)


class Batch:
    """Token ids, computed tokens, block tables and sampling parameters of every slot.

    Row `max_num_seqs` is the padding row: a greedy sequence in the null block with token 0 at position 0.
    A step gathers its rows by slot; padded rows gather the padding row.
    """

    sampling: SamplingState
    """The slots' sampling parameters."""
    padding_row: int
    """The row of missing slots."""

    def __init__(
        self,
        shapes: ShapeConfig,
        groups: Sequence[KvGroup],
        num_blocks: Sequence[int],
        device: torch.device,
        vocabulary: SamplingVocabulary,
    ) -> None:
        """Starts with all slots free."""
        self._shapes = shapes
        self._groups = tuple(groups)
        self._num_blocks = tuple(num_blocks)
        self._device = device
        self.padding_row = shapes.max_num_seqs
        rows = shapes.max_num_seqs + 1
        # A column more than the longest sequence, for the token sampled after its end.
        self._tokens = torch.zeros((rows, shapes.max_model_len + 1), dtype=torch.int64, device=device)
        self._computed = torch.zeros(rows, dtype=torch.int64, device=device)
        self._tables = [
            torch.full((rows, group.table_width(shapes)), NULL_BLOCK, dtype=torch.int32, device=device)
            for group in groups
        ]
        self.sampling = SamplingState(self._tokens, vocabulary)
        self._adapters = torch.full((rows,), NO_ADAPTER, dtype=torch.int32, device=device)
        self._admitted = StagedWrites(
            [self._tokens, self._computed, self._adapters, self.sampling.parameters.rows, *self._tables]
        )
        self._one_per_row = torch.arange(rows + shapes.decode_buckets[-1], dtype=torch.int32, device=device)
        # Copies on the host: plans are checked without waiting for the device. -1 marks a free slot.
        self._num_known = [-1] * rows
        self._num_computed = [0] * rows
        self._adapter_slots = [NO_ADAPTER] * rows
        self._num_table_blocks = [[0] * rows for _ in groups]
        self._room = [0] * rows

    def release(self, slot: int) -> None:
        """Frees a slot and points its tables to the null block. Releasing a free slot does nothing."""
        if self._num_known[slot] < 0:
            return
        self._num_known[slot] = -1
        self._num_computed[slot] = 0
        self._adapter_slots[slot] = NO_ADAPTER
        self._admitted.drop(slot)
        for counts in self._num_table_blocks:
            counts[slot] = 0
        # Last: the device may fail, and the slot is free even then.
        for table in self._tables:
            table[slot] = NULL_BLOCK

    def admit(self, request: Admission, adapter_slot: int = NO_ADAPTER) -> None:
        """Puts a request into its slot, with its LoRA adapter's slot. Changes nothing if it raises.

        The next `copy_admitted` writes it to the device, as steps and `grow` require.

        Raises:
            Internal: if the slot is taken or the request does not fit.
            InvalidArgument: if a parameter names a token beyond the vocabulary.
        """
        slot, known = request.slot, len(request.token_ids)
        if not 0 <= slot < self._shapes.max_num_seqs or self._num_known[slot] >= 0:
            raise Internal(f"the plan admits a request to slot {slot}, which is taken or does not exist")
        if not 0 <= request.num_computed_tokens < known <= self._shapes.max_model_len:
            raise Internal(
                f"the plan admits {known} tokens, {request.num_computed_tokens} of them computed, to slot"
                f" {slot}; at least one must be left to compute and at most {self._shapes.max_model_len} fit"
            )
        grants = [Growth(slot, group_id, block_ids) for group_id, block_ids in request.blocks.items()]
        for grant in grants:
            self._check_grant(grant, request.num_computed_tokens)
        if not 0 <= request.prompt_len <= known:
            raise Internal(
                f"the plan admits {known} tokens with a prompt of {request.prompt_len} to slot {slot}"
            )
        check_token_ids(request.sampling, self.sampling.vocabulary.size)
        self._num_known[slot] = known
        self._num_computed[slot] = request.num_computed_tokens
        self._adapter_slots[slot] = adapter_slot
        try:
            stage = self._admitted.add
            stage(slot, _TOKENS, slot * self._tokens.shape[1], request.token_ids)
            stage(slot, _COMPUTED, slot, (request.num_computed_tokens,))
            stage(slot, _ADAPTERS, slot, (adapter_slot,))
            parameters = self.sampling.set(request)
            stage(slot, _PARAMETERS, slot * len(parameters), parameters)
            for grant in grants:
                counts, width = self._num_table_blocks[grant.group_id], self._tables[grant.group_id].shape[1]
                stage(slot, _TABLES + grant.group_id, slot * width, grant.block_ids)
                counts[slot] = len(grant.block_ids)
            self._measure_room(slot)
        except BaseException:
            self.release(slot)
            raise

    def copy_admitted(self) -> None:
        """Copies all newly admitted requests to the device, in a single transfer."""
        self._admitted.copy()

    def grow(self, growth: Growth) -> None:
        """Appends blocks to a slot's table. Changes nothing if it raises.

        Raises:
            Internal: if the slot is free, a block does not exist or the table is full.
        """
        self._check_known(growth.slot)
        self._check_grant(growth, self._num_computed[growth.slot])
        self._append(growth)

    def ready(self, work: Work) -> Prefill | Decode | None:
        """Returns the runnable work: a decode step skips slots with several known tokens to compute.

        Raises:
            Internal: naming the first slot whose state contradicts the work.
        """
        if isinstance(work, Prefill):
            self._check_chunk(work)
            return work
        if not isinstance(work, Decode):
            raise Internal("the plan pools prompts, but this model generates tokens")
        if work.bucket not in self._shapes.decode_buckets or len(work.slots) > work.bucket:
            raise Internal(f"the plan decodes {len(work.slots)} slots in a bucket of {work.bucket}")
        if len(set(work.slots)) != len(work.slots):
            raise Internal("the plan names a slot twice")
        rows = []
        for slot in work.slots:
            self._check_known(slot)
            known = self._num_known[slot]
            if known == self._num_computed[slot] + 1:
                self._check_room(slot, known + work.steps - 1)
                rows.append(slot)
        if len(rows) == len(work.slots):
            return work
        return replace(work, slots=rows) if rows else None

    def longest_first(self, slots: Sequence[int]) -> list[int]:
        """Returns the slots in descending order of computed tokens. Equal ones keep their order."""
        return sorted(slots, key=lambda slot: -self._num_computed[slot])

    def bucket_of(self, work: Prefill) -> int:
        """Returns the tokens of a chunk's graph."""
        return work.bucket or self._shapes.chunk

    def prefill_inputs(
        self, chunk: int, work: Prefill | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, list[StepInput]]:
        """Returns token ids [chunk], positions [chunk] and the attention inputs of each KV group.

        All are of static shape, and padding without work.
        """
        block_size = self._shapes.block_size
        slot, start, count = (work.slot, work.start, work.num_tokens) if work else (self.padding_row, 0, 1)
        tokens = torch.zeros(chunk, dtype=torch.int64, device=self._device)
        positions = torch.zeros(chunk, dtype=torch.int64, device=self._device)
        tokens[:count] = self._tokens[slot, start : start + count]
        torch.arange(start, start + count, out=positions[:count])
        lengths = upload([0, count, start + count], self._device, torch.int32)
        inputs: list[StepInput] = []
        for group, table in zip(self._groups, self._tables, strict=True):
            row = table[slot]
            if group.kind is GroupKind.IN_PLACE_WINDOW:
                before = min(start, group.window)
                fill = upload([before, before + count], self._device, torch.int32)
                inputs.append(InPlaceInput(fill[:1, None], fill[1:, None], row[None], chunk))
                continue
            slots = torch.zeros(chunk, dtype=torch.int64, device=self._device)
            real = positions[:count]
            slots[:count] = row[real // block_size].long() * block_size + real % block_size
            inputs.append(PagedInput(lengths[2:], lengths[:2], row[None], slots, count))
        return tokens, positions, inputs

    def has_adapters(self, slots: Sequence[int]) -> bool:
        """Whether any of these slots uses a LoRA adapter."""
        return any(self._adapter_slots[slot] != NO_ADAPTER for slot in slots)

    def adapters_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the adapter slots of rows [bucket], int32 [bucket]; `NO_ADAPTER` for the base model."""
        return self._adapters[rows]

    def chunk_adapters(self, chunk: int, work: Prefill | None) -> torch.Tensor:
        """Returns the adapter slot of each token of a chunk, int32 [chunk]; `None` stands for padding."""
        adapter = NO_ADAPTER if work is None else self._adapter_slots[work.slot]
        return torch.full((chunk,), adapter, dtype=torch.int32, device=self._device)

    def decode_inputs(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[StepInput]]:
        """Returns token ids [bucket], positions [bucket] and the attention inputs of each KV group.

        `rows`, int64 [bucket], are the slots of the rows, including padding.
        """
        block_size, bucket = self._shapes.block_size, rows.shape[0]
        positions = self._computed.index_select(0, rows)
        tokens = self._tokens.take(_places(self._tokens, rows, positions))
        seq_lens = (positions + 1).int()
        blocks, offsets = positions // block_size, positions % block_size
        inputs: list[StepInput] = []
        for group, table in zip(self._groups, self._tables, strict=True):
            tables = table.index_select(0, rows)
            if group.kind is GroupKind.IN_PLACE_WINDOW:
                before = positions.clamp(max=group.window).int()[:, None]
                inputs.append(InPlaceInput(before, before + 1, tables, 1))
                continue
            block_ids = table.take(_places(table, rows, blocks))
            slots = torch.add(offsets, block_ids, alpha=block_size)
            inputs.append(PagedInput(seq_lens, self._one_per_row[: bucket + 1], tables, slots, bucket))
        return tokens, positions, inputs

    def sampling_batch(self, slots: Sequence[int]) -> SamplingBatch:
        """Returns the sampling requirements of a step for these slots."""
        return self.sampling.batch(slots, self._num_known)

    def tokens_of(self, slot: int, start: int, end: int) -> torch.Tensor:
        """Returns the slot's tokens from `start` to before `end`, int64; empty if `end <= start`."""
        return self._tokens[slot, start : max(start, end)]

    def advance_prefill(self, work: Prefill, token: torch.Tensor | None) -> None:
        """Records a computed chunk and the token sampled after it, int64 [1], if any."""
        end = work.start + work.num_tokens
        self._num_computed[work.slot] = end
        # As slices: to store a single number, PyTorch waits for the device.
        self._computed[work.slot : work.slot + 1].fill_(end)
        if token is not None:
            self._tokens[work.slot, end : end + 1] = token[:1]
            self._num_known[work.slot] = end + 1

    def advance_rows(self, rows: torch.Tensor, tokens: torch.Tensor) -> tuple[()]:
        """Records on the device a computed token and the next token (int64 [bucket]) of each row.

        Nothing depends on the tensors' values, so a device can capture this (hence the empty tuple).
        Padded rows are rewritten with their own values.
        """
        real = rows != self.padding_row
        computed = self._computed.index_select(0, rows) + real
        self._computed.put_(rows, computed)
        self._tokens.put_(_places(self._tokens, rows, computed), tokens * real)
        return ()

    def advance_decode(self, slots: Sequence[int]) -> None:
        """Records the same on the host."""
        for slot in slots:
            self._num_computed[slot] += 1
            self._num_known[slot] += 1

    def append(self, slot: int, token_ids: Sequence[int]) -> None:
        """Appends tokens to a slot's sequence; they count as known but not as computed."""
        start = self._num_known[slot]
        self._num_known[slot] = end = start + len(token_ids)
        tokens = upload(token_ids, self._device)
        self._tokens[slot, start:end] = tokens
        self.sampling.extend(slot, tokens)

    def free_positions(self, slot: int) -> int:
        """Returns how many tokens still fit into a slot's sequence."""
        return self._shapes.max_model_len - self._num_known[slot]

    def _check_known(self, slot: int) -> None:
        if not 0 <= slot < self._shapes.max_num_seqs or self._num_known[slot] < 0:
            raise Internal(f"the plan names slot {slot}, which is free or does not exist")

    def _check_grant(self, growth: Growth, computed: int) -> None:
        """Refuses nonexistent blocks, too many, and null blocks with visible tokens."""
        slot, group_id = growth.slot, growth.group_id
        if not 0 <= group_id < len(self._groups):
            raise Internal(f"the plan names KV group {group_id}, the model has {len(self._groups)}")
        group, held = self._groups[group_id], self._num_table_blocks[group_id][slot]
        # The earliest position that the next query, at position `computed`, attends to.
        seen_from = computed - group.window + 1 if group.kind is GroupKind.PAGED_WINDOW else 0
        for index, block in enumerate(growth.block_ids, start=held):
            if not 0 <= block < self._num_blocks[group_id]:
                raise Internal(
                    f"the plan names block {block} of KV group {group_id},"
                    f" which has {self._num_blocks[group_id]}"
                )
            if block == NULL_BLOCK and (index + 1) * self._shapes.block_size > seen_from:
                raise Internal(
                    f"the plan gives slot {slot} the null block as block {index} of KV group {group_id},"
                    f" which is still visible with {computed} tokens computed"
                )
        end, width = held + len(growth.block_ids), group.table_width(self._shapes)
        if end > width:
            raise Internal(f"slot {slot} would get {end} blocks of group {group_id}; its table holds {width}")

    def _append(self, growth: Growth) -> None:
        counts = self._num_table_blocks[growth.group_id]
        start = counts[growth.slot]
        end = start + len(growth.block_ids)
        blocks = upload(list(growth.block_ids), self._device, torch.int32)
        self._tables[growth.group_id][growth.slot, start:end] = blocks
        counts[growth.slot] = end
        self._measure_room(growth.slot)

    def _check_chunk(self, work: Prefill) -> None:
        slot, end = work.slot, work.start + work.num_tokens
        self._check_known(slot)
        known, computed = self._num_known[slot], self._num_computed[slot]
        if (bucket := self.bucket_of(work)) not in (buckets := self._shapes.chunk_sizes):
            raise Internal(f"the plan prefills in a bucket of {bucket}; the worker has {buckets}")
        if work.start != computed or not work.start < end <= known or work.num_tokens > bucket:
            raise Internal(
                f"the plan prefills tokens {work.start} to {end} of slot {slot},"
                f" which has {computed} of {known} computed"
            )
        if work.sample != (end == known):
            raise Internal(f"the plan must sample slot {slot} at its last known token, and only there")
        self._check_room(slot, end)

    def _check_room(self, slot: int, num_tokens: int) -> None:
        if num_tokens > self._room[slot]:
            raise Internal(
                f"slot {slot} has blocks for {self._room[slot]} tokens, too few for {num_tokens} tokens"
            )

    def _measure_room(self, slot: int) -> None:
        """Notes how many tokens fit into a slot's blocks."""
        room = self._shapes.max_model_len
        for group, counts in zip(self._groups, self._num_table_blocks, strict=True):
            # A single block in place holds the whole window.
            if group.kind is not GroupKind.IN_PLACE_WINDOW or not counts[slot]:
                room = min(room, counts[slot] * self._shapes.block_size)
        self._room[slot] = room


def _places(table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Returns the places of a table's entries in the flat table, int64 [rows]: cheaper than two indices."""
    return torch.add(columns, rows, alpha=table.shape[1])
