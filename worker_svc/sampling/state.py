"""A request's parameters with their defaults, and a slot's row of them in contiguous memory."""

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from protos.limits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS
from protos.steps import Admission
from protos.triptych.v1 import common_pb2
from worker_svc.devices.base import upload
from worker_svc.sampling.draw import sequence_seed
from worker_svc.sampling.filters import FEW
from worker_svc.sampling.thinking import ThinkingBudgets, thinking_bytes
from worker_svc.sampling.workspace import WORKSPACE_BYTES, Workspace

# Division of logits by a smaller temperature overflows float32. vLLM raises temperatures below 0.01 to 0.01;
# we apply them unchanged down to this value and sample greedily below it.
_GREEDY_BELOW = 1e-5
# A device's own draws begin here: logits divided by less may exceed a half-precision type.
_LEAST_TEMPERATURE = 0.01

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


# Entries that one request may have, which is the width of the tables. They hold every request that validation
# accepts. Bans are bad words and, until min_tokens is reached, stop_token_ids and the model's end tokens.
_MAX_END_TOKENS = 256  # more than any model has
MAX_BIASES = MAX_LOGIT_BIASES
MAX_BANS = MAX_BAD_WORDS + MAX_STOP_TOKEN_IDS + _MAX_END_TOKENS
MAX_BAN_TOKENS = MAX_BAD_WORD_TOKENS

FOREVER = torch.iinfo(torch.int64).max
_NARROWEST = 16


@dataclass(frozen=True)
class SamplingVocabulary:
    """The facts about a model's vocabulary that sampling needs."""

    size: int
    """Width of the logits."""
    end_tokens: tuple[int, ...] = ()
    """Tokens that end a sequence; `min_tokens` forbids them."""


class FilterScope(enum.IntEnum):
    """The tokens among which a filter searches its threshold."""

    NONE = 0
    """The filter is off."""
    FEW = 1
    """The `FEW` most probable tokens."""
    ALL = 2
    """The whole vocabulary."""


@dataclass(frozen=True)
class SamplingOps:
    """The operations that a step must compute for its rows. A width of 0 turns an operation off."""

    random: bool = False
    """Some rows are sampled."""
    greedy: bool = False
    """Some rows are greedy."""
    min_p: bool = False
    """Some rows have a `min_p`."""
    top_k: FilterScope = FilterScope.NONE
    """Where to search the thresholds of `top_k`."""
    top_p: FilterScope = FilterScope.NONE
    """Where to search the thresholds of `top_p`."""
    masks: bool = False
    """Some rows have `allowed_token_ids`."""
    bans: int = 0
    """Width of the ban tables, in entries."""
    ban_prefix: int = 0
    """Tokens of the longest bad word, except its last."""
    biases: int = 0
    """Width of the bias tables, in entries."""
    history: int = 0
    """Leading tokens of the sequences that penalties read."""

    @property
    def adjusts(self) -> bool:
        """Whether logits are adjusted before the choice."""
        return bool(self.masks or self.bans or self.biases or self.history)

    @property
    def none(self) -> bool:
        """Whether each row takes the most probable token of the unchanged logits."""
        return not (self.random or self.adjusts)

    def __or__(self, other: "SamplingOps") -> "SamplingOps":
        """Returns the needs of both."""
        return SamplingOps(
            *(max(getattr(self, each.name), getattr(other, each.name)) for each in fields(self))
        )

    def covers(self, other: "SamplingOps") -> bool:
        """Whether a step that computes this satisfies the `other` needs."""
        return self | other == self


@dataclass(frozen=True)
class SamplingBatch:
    """The requirements of a step's rows."""

    needs: SamplingOps
    """The operations to compute."""
    logprobs: Sequence[int | None]
    """`SamplingParams.logprobs` of each real row; `None` for no log-probabilities."""

    @property
    def reports(self) -> bool:
        """Whether any row asks for log-probabilities."""
        return any(count is not None for count in self.logprobs)


class SamplingState:
    """The parameters of each slot, and the token counts for penalties.

    Every tensor holds a row per slot, and the last row, `num_slots`, for padding, which is greedy. The
    tables below exist only after `allocate`.
    """

    counts: torch.Tensor
    """int32 [slots + 1, vocab]: how often each token occurs in the output of a slot with penalties."""
    allowed: torch.Tensor
    """int32 [slots + 1, words]: a bit per token, set if `allowed_token_ids` allows it, lowest bit first."""
    bias_ids: torch.Tensor
    """int64 [slots + 1, entries]: biased tokens. Unused entries add 0 to token 0."""
    bias_values: torch.Tensor
    """float32 [slots + 1, entries]: the biases of `bias_ids`."""
    ban_tokens: torch.Tensor
    """int64 [slots + 1, entries]: banned tokens."""
    ban_until: torch.Tensor
    """int64 [slots + 1, entries]: the position from which on each ban is lifted."""
    ban_prefix: torch.Tensor
    """int32 [slots + 1, entries, tokens]: tokens before each banned token, right-aligned; -1 matches any."""
    ban_prefix_len: torch.Tensor
    """int32 [slots + 1, entries]: length of each prefix."""

    def __init__(self, tokens: torch.Tensor, vocabulary: SamplingVocabulary) -> None:
        """Starts with all slots greedy.

        Args:
            tokens: int64 [slots + 1, longest + 1], the slots' token ids; the batch keeps them up to date.
            vocabulary: the model's vocabulary.
        """
        rows, device = tokens.shape[0], tokens.device
        self.tokens = tokens
        self.vocabulary = vocabulary
        self.parameters = SlotParameters.greedy(rows, vocabulary.size, device)
        """Each slot's parameters, except those in tables."""
        self.thinking = ThinkingBudgets(tokens, self.parameters.prompt_len)
        """The budgets of thinking. They add no operations to steps without any."""
        # Slots with entries in the tables, which the next request in the slot replaces.
        self._listed: set[int] = set()
        self._workspace = Workspace(0, vocabulary.size, device)
        self._has_tables = False
        # Equal needs share one object.
        self._known_needs: dict[SamplingOps, SamplingOps] = {}
        self._needs = [self._interned(SamplingOps(greedy=True))] * rows
        # The position from which on each slot has no bans, and the slots that have not reached theirs.
        self._banned_until = [0] * rows
        self._banned: set[int] = set()
        self._logprobs: list[int | None] = [None] * rows
        self._takes_any_numbers = [False] * rows
        self._last_slots: tuple[int, ...] | None = None
        self._last = SamplingBatch(SamplingOps(), ())

    def allocate(self) -> None:
        """Allocates tables and counts, unless they exist."""
        if self._has_tables:
            return
        rows, device, size = self.tokens.shape[0], self.tokens.device, self.vocabulary.size
        words = -(-size // 32)
        self.counts = torch.zeros((rows, size), dtype=torch.int32, device=device)
        self.allowed = torch.full((rows, words), -1, dtype=torch.int32, device=device)
        self.bias_ids = torch.zeros((rows, MAX_BIASES), dtype=torch.int64, device=device)
        self.bias_values = torch.zeros((rows, MAX_BIASES), device=device)
        self.ban_tokens = torch.zeros((rows, MAX_BANS), dtype=torch.int64, device=device)
        self.ban_until = torch.zeros((rows, MAX_BANS), dtype=torch.int64, device=device)
        self.ban_prefix = torch.full(
            (rows, MAX_BANS, MAX_BAN_TOKENS - 1), -1, dtype=torch.int32, device=device
        )
        self.ban_prefix_len = torch.zeros((rows, MAX_BANS), dtype=torch.int32, device=device)
        self._has_tables = True

    def workspace(self, rows: int) -> Workspace:
        """Returns memory for a step of `rows` rows; later steps reuse it."""
        if rows > self._workspace.num_rows:
            self._workspace = Workspace(rows, self.vocabulary.size, self.tokens.device)
        return self._workspace

    def variants(self) -> list[SamplingOps]:
        """Returns the needs to capture, cheapest first. Together they cover any step."""
        full = SamplingOps(
            masks=True,
            bans=MAX_BANS,
            ban_prefix=MAX_BAN_TOKENS - 1,
            biases=MAX_BIASES,
            history=self.tokens.shape[1],
        )
        drawn = SamplingOps(random=True, greedy=True)
        few = replace(drawn, min_p=True, top_k=FilterScope.FEW, top_p=FilterScope.FEW)
        filtered = replace(drawn, min_p=True, top_k=FilterScope.ALL, top_p=FilterScope.ALL)
        return [
            drawn,
            few,
            filtered,
            *(full | each for each in (SamplingOps(greedy=True), drawn, few, filtered)),
        ]

    def set(self, request: Admission) -> tuple[int, ...]:
        """Stores a request's parameters, which the scheduler has checked, and counts its sampled tokens.

        Returns:
            The slot's row of `parameters.rows`, which the caller writes.
        """
        self._last_slots = None
        slot, sampling = request.slot, request.sampling
        self.thinking.set(request)
        self._logprobs[slot] = sampling.logprobs if sampling.HasField("logprobs") else None
        self._takes_any_numbers[slot] = (
            sampling.seed_is_drawn and temperature_of(sampling) >= _LEAST_TEMPERATURE
        )
        bans = self._bans(request)
        needs = self._needs[slot] = self._interned(self._needs_of(sampling, bans))
        self._banned_until[slot] = max((until for _, until in bans), default=0)
        self._banned.discard(slot)
        if 0 < self._banned_until[slot] < FOREVER:
            self._banned.add(slot)
        if needs.adjusts:
            self.allocate()
        lists = bool(needs.masks or needs.bans or needs.biases)
        if lists or slot in self._listed:
            # In full: a step computes every row at the largest width.
            self._set_masks(slot, sampling.allowed_token_ids)
            self._set_biases(slot, sampling)
            self._set_bans(slot, bans)
        (self._listed.add if lists else self._listed.discard)(slot)
        if needs.history:
            self.counts[slot].fill_(0)
            if output := request.token_ids[request.prompt_len :]:
                self.extend(slot, self._upload(output, torch.int64))
        return row_of(request, self.vocabulary.size)

    def batch(self, slots: Sequence[int], lengths: Sequence[int]) -> SamplingBatch:
        """Returns the requirements of a step.

        Args:
            slots: slots of the real rows.
            lengths: number of tokens so far, by slot.
        """
        self._lift_bans(slots, lengths)
        if len(slots) == 1:
            # Mostly the last chunk of a prompt, between decode steps of the same slots: keep their cached
            # batch.
            batch = SamplingBatch(self._needs[slots[0]], [self._logprobs[slots[0]]])
        else:
            key = tuple(slots)
            if key != self._last_slots:
                self._last_slots, self._last = key, self._batch_of(slots)
            batch = self._last
        if not batch.needs.history:
            return batch
        longest = max(lengths[slot] for slot in slots if self._needs[slot].history)
        history = min(_width(longest), self.tokens.shape[1])
        return replace(batch, needs=replace(batch.needs, history=history))

    def _batch_of(self, slots: Sequence[int]) -> SamplingBatch:
        needs = SamplingOps()
        for each in {id(self._needs[slot]): self._needs[slot] for slot in slots}.values():
            needs |= each
        return SamplingBatch(needs, [self._logprobs[slot] for slot in slots])

    def _lift_bans(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Drops the bans of slots past `min_tokens`, so they cost nothing more."""
        if not self._banned:
            return
        for slot in self._banned.intersection(slots):
            if lengths[slot] >= self._banned_until[slot]:
                self._needs[slot] = self._interned(replace(self._needs[slot], bans=0, ban_prefix=0))
                self._banned.discard(slot)
                self._last_slots = None

    def restricts(self, slot: int) -> bool:
        """Whether a slot's parameters may forbid or set a token anywhere, not only before `min_tokens`."""
        return (
            self._needs[slot].masks or self._banned_until[slot] == FOREVER or self.thinking.limit_any((slot,))
        )

    def takes_any_numbers(self, slot: int) -> bool:
        """Whether a device may draw for a slot with its own numbers, by temperature, top-k and top-p."""
        needs = self._needs[slot]
        return (
            self._takes_any_numbers[slot]
            and needs.random
            and not (needs.min_p or needs.adjusts)
            and self._logprobs[slot] is None
        )

    def is_random(self, slot: int) -> bool:
        """Whether a slot's tokens are drawn."""
        return self._needs[slot].random

    def filters(self, slot: int) -> bool:
        """Whether a slot uses a filter: `min_p`, `top_k` or `top_p`."""
        needs = self._needs[slot]
        return needs.random and bool(needs.min_p or needs.top_k or needs.top_p)

    def extend(self, slot: int, tokens: torch.Tensor) -> None:
        """Counts several tokens of a slot, int64 [tokens]."""
        rows = torch.full_like(tokens, slot)
        self.count(self._needs[slot], rows, tokens)

    def count(self, needs: SamplingOps, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Counts a token per row if the step needs counts. Does not wait for the device.

        Args:
            needs: the step's needs.
            rows: int64 [rows], the slot of each row.
            tokens: int64 [rows].
        """
        if needs.history:
            places = rows * self.vocabulary.size + tokens
            self.counts.view(-1).scatter_add_(0, places, torch.ones_like(places, dtype=torch.int32))

    def _interned(self, needs: SamplingOps) -> SamplingOps:
        return self._known_needs.setdefault(needs, needs)

    def _needs_of(
        self, sampling: common_pb2.SamplingParams, bans: Sequence[tuple[Sequence[int], int]]
    ) -> SamplingOps:
        random = temperature_of(sampling) > 0
        penalties = sampling.presence_penalty or sampling.frequency_penalty or repetition_of(sampling) != 1
        top_k = FilterScope.NONE
        if random and 0 < sampling.top_k < self.vocabulary.size:
            top_k = FilterScope.FEW if sampling.top_k <= FEW else FilterScope.ALL
        return SamplingOps(
            random=random,
            greedy=not random,
            min_p=random and sampling.min_p > 0,
            top_k=top_k,
            top_p=(top_k or FilterScope.ALL) if random and top_p_of(sampling) < 1 else FilterScope.NONE,
            masks=bool(sampling.allowed_token_ids),
            bans=min(_width(len(bans)), MAX_BANS),
            ban_prefix=max((len(word) - 1 for word, _ in bans), default=0),
            biases=min(_width(len(sampling.logit_bias)), MAX_BIASES),
            history=1 if penalties else 0,
        )

    def _bans(self, request: Admission) -> list[tuple[Sequence[int], int]]:
        """Returns the banned token sequences, each with the position from which on the ban is lifted."""
        sampling = request.sampling
        bans: list[tuple[Sequence[int], int]] = [(word.token_ids, FOREVER) for word in sampling.bad_words]
        until = request.prompt_len + sampling.min_tokens
        if len(request.token_ids) < until:
            ends = dict.fromkeys((*self.vocabulary.end_tokens, *sampling.stop_token_ids))
            bans.extend(((token,), until) for token in ends)
        return bans

    def _set_masks(self, slot: int, allowed: Sequence[int]) -> None:
        if not allowed:
            self.allowed[slot].fill_(-1)
            return
        bits = torch.zeros(self.allowed.shape[1] * 32, dtype=torch.int32, device=self.allowed.device)
        bits.index_fill_(0, self._upload(allowed, torch.int64), 1)
        shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
        self.allowed[slot] = (bits.view(-1, 32) << shifts).sum(dim=-1, dtype=torch.int32)

    def _set_biases(self, slot: int, sampling: common_pb2.SamplingParams) -> None:
        count = len(sampling.logit_bias)
        self.bias_ids[slot].fill_(0)
        self.bias_values[slot].fill_(0)
        if count:
            self.bias_ids[slot, :count] = self._upload(list(sampling.logit_bias), torch.int64)
            values = self._upload(list(sampling.logit_bias.values()), torch.float32)
            self.bias_values[slot, :count] = values

    def _set_bans(self, slot: int, bans: Sequence[tuple[Sequence[int], int]]) -> None:
        self.ban_until[slot].fill_(0)
        if not bans:
            return
        count, width = len(bans), self.ban_prefix.shape[2]
        columns = self._upload([(word[-1], until, len(word) - 1) for word, until in bans], torch.int64)
        prefixes = [token for word, _ in bans for token in (*[-1] * (width + 1 - len(word)), *word[:-1])]
        self.ban_tokens[slot].fill_(0)
        self.ban_tokens[slot, :count] = columns[:, 0]
        self.ban_until[slot, :count] = columns[:, 1]
        self.ban_prefix[slot, :count] = self._upload(prefixes, torch.int32).view(count, width)
        self.ban_prefix_len[slot, :count] = columns[:, 2]

    def _upload(self, values: Sequence[float] | Sequence[Sequence[int]], dtype: torch.dtype) -> torch.Tensor:
        return upload(values, self.tokens.device, dtype)


def _width(entries: int) -> int:
    """Returns a table width for `entries` entries. Few widths mean few shapes of steps."""
    width = _NARROWEST if entries else 0
    while width < entries:
        width *= 4
    return width


# Bytes per element of temporary tensors outside the workspace.
_MASK = 4 + 1  # [rows, vocab]: values added to logits, and the masks' bytes as indices
_DRAW = 8  # [rows, vocab]: a padded copy of the masses, where the vocabulary is not a multiple of a block
_LOGPROBS = 4 + 1 + 8  # [rows, vocab]: exponentials, the comparison for ranks, and temporaries of topk
_BANS = 4 + 8  # [rows, bans, tokens]: prefixes and comparisons
_BIASES = 8 + 4 + 8  # [rows, biases]
_HISTORY = 6 * 8 + 4 * 4  # [rows, longest]: tokens, places, counts and the logits before, between and after


def state_bytes(num_slots: int, vocab_size: int) -> int:
    """Returns the bytes of the tables and counts of `num_slots` slots."""
    masks = 4 * -(-vocab_size // 32)
    bans = MAX_BANS * (8 + 8 + 4 * MAX_BAN_TOKENS)
    tables = (num_slots + 1) * (4 * vocab_size + masks + MAX_BIASES * (8 + 4) + bans)
    return tables + thinking_bytes(num_slots)


def sampling_bytes(rows: int, vocab_size: int, longest: int) -> int:
    """Returns the bytes that sampling a step takes: the workspace and the largest temporary tensors.

    Args:
        rows: rows of the largest step.
        vocab_size: width of the logits.
        longest: tokens of the longest sequence.
    """
    temporary = (
        vocab_size * max(_MASK, _DRAW, _LOGPROBS),
        MAX_BANS * MAX_BAN_TOKENS * _BANS,
        MAX_BIASES * _BIASES,
        longest * _HISTORY,
    )
    return rows * vocab_size * WORKSPACE_BYTES + rows * max(temporary)
