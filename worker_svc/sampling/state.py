"""The sampling parameters of every slot, as tensors, so that a step gathers its rows' without a loop.

Small ones are always there. Tables and counts come with the first request that needs them, or before graphs are captured; how much memory
they take is counted either way (``footprint.state_bytes``).
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from protos.errors import InvalidArgument
from protos.limits import MAX_BAD_WORD_TOKENS, MAX_LOGIT_BIASES
from protos.steps import Admission
from protos.triptych.v1 import common_pb2
from worker_svc.sampling.draw import sequence_seed
from worker_svc.sampling.filters import FEW
from worker_svc.sampling.workspace import Workspace

# What one request may have; tables are as wide. No less than what a scheduler lets through (scheduler_svc/convert/sampling.py): bans are
# bad words and, while min_tokens holds, its stop_token_ids and the model's end tokens.
MAX_BIASES = MAX_LOGIT_BIASES
MAX_BANS = 1024
MAX_BAN_TOKENS = MAX_BAD_WORD_TOKENS

# Dividing logits by less overflows float32. vLLM raises temperatures below 0.01 to that; we serve them as they are down to this one.
_GREEDY_BELOW = 1e-5

FOREVER = torch.iinfo(torch.int64).max
_NARROWEST = 16


@dataclass(frozen=True)
class SamplingVocabulary:
    """What sampling has to know of a model."""

    size: int
    """Of a row of logits."""
    end_tokens: tuple[int, ...] = ()
    """Tokens that end a sequence: ``min_tokens`` holds them back."""


class Reach(enum.IntEnum):
    """Among how many tokens a filter has to look for its threshold."""

    NONE = 0
    FEW = 1
    """The few likeliest."""
    ALL = 2


@dataclass(frozen=True)
class Needs:
    """What a step has to compute so that each of its rows gets what it asked for. Widths are of tables, in entries; 0 for none of it."""

    random: bool = False
    """Some rows are drawn."""
    greedy: bool = False
    """Some are not."""
    min_p: bool = False
    top_k: Reach = Reach.NONE
    top_p: Reach = Reach.NONE
    masks: bool = False
    bans: int = 0
    ban_prefix: int = 0
    """Tokens of the longest bad word, less the last one."""
    biases: int = 0
    history: int = 0
    """Leading tokens of a sequence that penalties look at."""

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before the choice."""
        return bool(self.masks or self.bans or self.biases or self.history)

    @property
    def none(self) -> bool:
        """Whether each row takes the most probable token of the logits as they are."""
        return not (self.random or self.adjusts)

    def __or__(self, other: "Needs") -> "Needs":
        """What both need."""
        return Needs(*(max(getattr(self, each.name), getattr(other, each.name)) for each in fields(self)))

    def covers(self, other: "Needs") -> bool:
        """Whether a step that computes this does for one that needs the other."""
        return self | other == self


@dataclass(frozen=True)
class SamplingBatch:
    """What the rows of one step ask for."""

    needs: Needs
    logprobs: Sequence[int | None]
    """Of the real rows; see ``common_pb2.SamplingParams.logprobs``."""

    @property
    def reports(self) -> bool:
        """Whether any row wants log-probabilities."""
        return any(count is not None for count in self.logprobs)


class SamplingState:
    """The slots' parameters, and what penalties count.

    Row ``num_slots`` belongs to padding and is greedy.

    Attributes:
        tokens: int64 [slots + 1, longest + 1], the slots' token ids; the batch's.
        temperature: float32 [slots + 1]; 0 is greedy. Likewise ``min_p``, ``repetition``, ``frequency``, ``presence``.
        top_p: float64 [slots + 1].
        top_k: int64 [slots + 1]; the vocabulary's size is off.
        seed: int64 [slots + 1], of the slot's sequence.
        prompt_len: int64 [slots + 1].
        counts: int32 [slots + 1, vocab], how often each token is in the output of a slot with penalties.
        allowed: int32 [slots + 1, words], a bit for each token that ``allowed_token_ids`` lets through, lowest first.
        bias_ids: int64 [slots + 1, entries] with ``bias_values``, float32. Entries without use add 0 to token 0.
        ban_tokens: int64 [slots + 1, entries]: tokens that must not come, ``ban_until`` (int64) a position, behind ``ban_prefix``
            (int64 [slots + 1, entries, tokens], aligned at its end, -1 for any) of ``ban_prefix_len`` tokens.
    """

    counts: torch.Tensor
    allowed: torch.Tensor
    bias_ids: torch.Tensor
    bias_values: torch.Tensor
    ban_tokens: torch.Tensor
    ban_until: torch.Tensor
    ban_prefix: torch.Tensor
    ban_prefix_len: torch.Tensor

    def __init__(self, tokens: torch.Tensor, vocabulary: SamplingVocabulary) -> None:
        """All slots start greedy.

        Args:
            tokens: int64 [slots + 1, longest + 1], which the batch keeps up to date.
            vocabulary: the model's.
        """
        rows, device = tokens.shape[0], tokens.device
        self.tokens = tokens
        self.vocabulary = vocabulary
        self.temperature = torch.zeros(rows, device=device)
        self.top_p = torch.ones(rows, dtype=torch.float64, device=device)
        self.top_k = torch.full((rows,), vocabulary.size, device=device)
        self.min_p = torch.zeros(rows, device=device)
        self.seed = torch.zeros(rows, dtype=torch.int64, device=device)
        self.prompt_len = torch.zeros(rows, dtype=torch.int64, device=device)
        self.repetition = torch.ones(rows, device=device)
        self.frequency = torch.zeros(rows, device=device)
        self.presence = torch.zeros(rows, device=device)
        self._workspace = Workspace(0, vocabulary.size, device)
        self._has_tables = False
        # Equal ones are one object.
        self._known_needs: dict[Needs, Needs] = {}
        self._needs = [self._interned(Needs(greedy=True))] * rows
        # From which position on nothing is banned of a slot any more, and the slots that such a position is ahead of.
        self._banned_until = [0] * rows
        self._banned: set[int] = set()
        self._logprobs: list[int | None] = [None] * rows
        self._last_slots: tuple[int, ...] | None = None
        self._last = SamplingBatch(Needs(), ())

    def allocate(self) -> None:
        """Makes tables and counts, if they are not there yet."""
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
        """Memory for a step of so many rows; it stays for the next one."""
        if rows > self._workspace.num_rows:
            self._workspace = Workspace(rows, self.vocabulary.size, self.tokens.device)
        return self._workspace

    def variants(self) -> list[Needs]:
        """What is captured: one of these covers any step, the cheapest first."""
        full = Needs(
            masks=True,
            bans=MAX_BANS,
            ban_prefix=MAX_BAN_TOKENS - 1,
            biases=MAX_BIASES,
            history=self.tokens.shape[1],
        )
        drawn = Needs(random=True, greedy=True)
        few = replace(drawn, min_p=True, top_k=Reach.FEW, top_p=Reach.FEW)
        filtered = replace(drawn, min_p=True, top_k=Reach.ALL, top_p=Reach.ALL)
        return [drawn, few, filtered, *(full | each for each in (Needs(greedy=True), drawn, few, filtered))]

    def check(self, request: Admission) -> None:
        """Does nothing if a request's parameters can be met.

        Raises:
            InvalidArgument: naming the parameter and its bound.
        """
        sampling, size = request.sampling, self.vocabulary.size
        for name, ids in (
            ("logit_bias", sampling.logit_bias),
            ("allowed_token_ids", sampling.allowed_token_ids),
            ("bad_words", [token for word in sampling.bad_words for token in word.token_ids]),
            ("stop_token_ids", sampling.stop_token_ids),
        ):
            beyond = next((token for token in ids if not 0 <= token < size), None)
            if beyond is not None:
                raise InvalidArgument(f"{name} has token {beyond}, and the vocabulary has {size}", param=name)
        if len(sampling.logit_bias) > MAX_BIASES:
            raise InvalidArgument(
                f"logit_bias has {len(sampling.logit_bias)} tokens, at most {MAX_BIASES} are served; use allowed_token_ids to keep few",
                param="logit_bias",
            )
        if any(not 1 <= len(word.token_ids) <= MAX_BAN_TOKENS for word in sampling.bad_words):
            raise InvalidArgument(f"bad_words must have 1 to {MAX_BAN_TOKENS} tokens each", param="bad_words")
        if len(self._bans(request)) > MAX_BANS:
            name = "bad_words" if len(sampling.bad_words) > MAX_BANS // 2 else "stop_token_ids"
            raise InvalidArgument(
                f"bad_words, and with min_tokens the stop_token_ids, have more than {MAX_BANS} entries together",
                param=name,
            )

    def set(self, request: Admission) -> None:
        """Takes over a request's parameters, which :meth:`check` has let through, and counts what it has sampled before."""
        slot, sampling = request.slot, request.sampling
        self._last_slots = None
        self.temperature[slot] = _temperature(sampling)
        self.top_p[slot] = _top_p(sampling)
        self.top_k[slot] = min(sampling.top_k, self.vocabulary.size) or self.vocabulary.size
        self.min_p[slot] = (
            sampling.min_p or 0.0
        )  # thresholds are compared as bits, and -0.0 has one more than 0.0
        self.seed[slot] = sequence_seed(sampling.seed, request.sequence)
        self.prompt_len[slot] = request.prompt_len
        self.repetition[slot] = _repetition_penalty(sampling)
        self.frequency[slot] = sampling.frequency_penalty
        self.presence[slot] = sampling.presence_penalty
        self._logprobs[slot] = sampling.logprobs if sampling.HasField("logprobs") else None
        bans = self._bans(request)
        needs = self._needs[slot] = self._interned(self._needs_of(sampling, bans))
        self._banned_until[slot] = max((until for _, until in bans), default=0)
        self._banned.discard(slot)
        if 0 < self._banned_until[slot] < FOREVER:
            self._banned.add(slot)
        if needs.adjusts:
            self.allocate()
        if not self._has_tables:
            return
        # Rows of other requests in a step are looked at as far as its neediest one needs: all of them say what they want.
        self._set_masks(slot, sampling.allowed_token_ids)
        self._set_biases(slot, sampling)
        self._set_bans(slot, bans)
        if needs.history:
            output = torch.tensor(request.token_ids[request.prompt_len :], dtype=torch.int64)
            counts = torch.bincount(output, minlength=self.vocabulary.size)
            self.counts[slot] = counts.to(self.counts)

    def batch(self, slots: Sequence[int], lengths: Sequence[int]) -> SamplingBatch:
        """What a step has to compute.

        Args:
            slots: the real rows'.
            lengths: known tokens, by slot.
        """
        self._lift_bans(slots, lengths)
        if len(slots) == 1:
            # A prompt's last chunk, mostly, between steps of the same many slots.
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
        needs = Needs()
        for each in {id(self._needs[slot]): self._needs[slot] for slot in slots}.values():
            needs |= each
        return SamplingBatch(needs, [self._logprobs[slot] for slot in slots])

    def _lift_bans(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Forgets bans that are over: ``min_tokens`` is paid for as long as it holds."""
        if not self._banned:
            return
        for slot in self._banned.intersection(slots):
            if lengths[slot] >= self._banned_until[slot]:
                self._needs[slot] = self._interned(replace(self._needs[slot], bans=0, ban_prefix=0))
                self._banned.discard(slot)
                self._last_slots = None

    def restricts(self, slot: int) -> bool:
        """Whether a slot's parameters may forbid a token wherever it comes."""
        return self._needs[slot].masks or self._banned_until[slot] == FOREVER

    def filters(self, slot: int) -> bool:
        """Whether a slot drops tokens by how likely others are."""
        needs = self._needs[slot]
        return needs.random and bool(needs.min_p or needs.top_k or needs.top_p)

    def extend(self, slot: int, tokens: torch.Tensor) -> None:
        """Counts tokens that one slot got all at once, int64 [tokens]."""
        rows = torch.full_like(tokens, slot)
        self.count(self._needs[slot], rows, tokens)

    def count(self, needs: Needs, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Counts a token that each row got (int64 [rows], both), if the step needs that; without a look at what the tensors hold."""
        if needs.history:
            places = rows * self.vocabulary.size + tokens
            self.counts.view(-1).scatter_add_(0, places, torch.ones_like(places, dtype=torch.int32))

    def _interned(self, needs: Needs) -> Needs:
        return self._known_needs.setdefault(needs, needs)

    def _needs_of(
        self, sampling: common_pb2.SamplingParams, bans: Sequence[tuple[Sequence[int], int]]
    ) -> Needs:
        random = _temperature(sampling) > 0
        penalties = (
            sampling.presence_penalty or sampling.frequency_penalty or _repetition_penalty(sampling) != 1
        )
        top_k = Reach.NONE
        if random and 0 < sampling.top_k < self.vocabulary.size:
            top_k = Reach.FEW if sampling.top_k <= FEW else Reach.ALL
        return Needs(
            random=random,
            greedy=not random,
            min_p=random and sampling.min_p > 0,
            top_k=top_k,
            top_p=(top_k or Reach.ALL) if random and _top_p(sampling) < 1 else Reach.NONE,
            masks=bool(sampling.allowed_token_ids),
            bans=min(_width(len(bans)), MAX_BANS),
            ban_prefix=max((len(word) - 1 for word, _ in bans), default=0),
            biases=min(_width(len(sampling.logit_bias)), MAX_BIASES),
            history=1 if penalties else 0,
        )

    def _bans(self, request: Admission) -> list[tuple[Sequence[int], int]]:
        """Token sequences that must not come, each with the position from which on it may."""
        sampling = request.sampling
        bans: list[tuple[Sequence[int], int]] = [(word.token_ids, FOREVER) for word in sampling.bad_words]
        until = request.prompt_len + sampling.min_tokens
        if len(request.token_ids) < until:
            ends = dict.fromkeys((*self.vocabulary.end_tokens, *sampling.stop_token_ids))
            bans.extend(((token,), until) for token in ends)
        return bans

    def _set_masks(self, slot: int, allowed: Sequence[int]) -> None:
        if not allowed:
            self.allowed[slot] = -1
            return
        bits = torch.zeros(self.allowed.shape[1] * 32, dtype=torch.int32)
        bits[torch.tensor(allowed)] = 1
        words = (bits.view(-1, 32).long() << torch.arange(32)).sum(dim=-1)
        self.allowed[slot] = words.to(torch.int32).to(self.allowed.device)

    def _set_biases(self, slot: int, sampling: common_pb2.SamplingParams) -> None:
        count = len(sampling.logit_bias)
        self.bias_ids[slot] = 0
        self.bias_values[slot] = 0
        if count:
            self.bias_ids[slot, :count] = torch.tensor(list(sampling.logit_bias)).to(self.bias_ids)
            values = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32)
            self.bias_values[slot, :count] = values.to(self.bias_values)

    def _set_bans(self, slot: int, bans: Sequence[tuple[Sequence[int], int]]) -> None:
        self.ban_until[slot] = 0
        if not bans:
            return
        count, width = len(bans), self.ban_prefix.shape[2]
        prefixes = [[-1] * (width + 1 - len(word)) + list(word[:-1]) for word, _ in bans]
        self.ban_tokens[slot] = 0
        self.ban_tokens[slot, :count] = torch.tensor([word[-1] for word, _ in bans]).to(self.ban_tokens)
        self.ban_until[slot, :count] = torch.tensor([until for _, until in bans]).to(self.ban_until)
        self.ban_prefix[slot, :count] = torch.tensor(prefixes).to(self.ban_prefix)
        lengths = torch.tensor([len(word) - 1 for word, _ in bans])
        self.ban_prefix_len[slot, :count] = lengths.to(self.ban_prefix_len)


def _temperature(sampling: common_pb2.SamplingParams) -> float:
    if not sampling.HasField("temperature"):
        return 1.0
    return sampling.temperature if sampling.temperature >= _GREEDY_BELOW else 0.0


def _top_p(sampling: common_pb2.SamplingParams) -> float:
    return sampling.top_p if sampling.HasField("top_p") else 1.0


def _repetition_penalty(sampling: common_pb2.SamplingParams) -> float:
    return sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0


def _width(entries: int) -> int:
    """A width that so many entries fit into: one of few, so that steps have few shapes."""
    width = _NARROWEST if entries else 0
    while width < entries:
        width *= 4
    return width
