"""What the scheduler tells a worker to do in one step, and what comes of it; free of wire types and of tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from protos.errors import TriptychError
from worker_svc.grammars.spec import Spec
from worker_svc.plans.geometry import PoolShape


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request's tokens are chosen."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Probability mass of the smallest set of likeliest tokens that is kept, in (0, 1]."""
    top_k: int = 0
    """Number of likeliest tokens that are kept; 0 for all."""
    min_p: float = 0.0
    """Tokens less likely than this times the likeliest are dropped, in [0, 1]."""
    seed: int = 0
    """Unsigned, 64 bits."""
    logprobs: int | None = None
    """Likeliest tokens whose log-probabilities are reported beside the chosen one's; ``None`` for no report at all."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that the output has; 0 is off."""
    frequency_penalty: float = 0.0
    """The same for each time that the output has them."""
    repetition_penalty: float = 1.0
    """Divides the logits above 0, and multiplies those below, of tokens that prompt or output have; more than 0, 1 is off."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits, by token."""
    allowed_token_ids: Sequence[int] = ()
    """If not empty, no others are sampled."""
    bad_words: Sequence[Sequence[int]] = ()
    """Token sequences whose last token is not sampled where the output ends with the others."""
    min_tokens: int = 0
    """End tokens and ``stop_token_ids`` are not sampled before that many new tokens."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the sequence beside the model's own end tokens."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A request takes a slot."""

    slot: int
    token_ids: Sequence[int]
    """Every token known so far: the prompt, and after a preemption or a lost worker also what was sampled."""
    num_computed_tokens: int
    """Leading tokens whose keys and values are in the blocks already."""
    sampling: Sampling
    blocks: Mapping[int, Sequence[int]]
    """First block ids, by KV group. The null block stands for those that lie behind a paged window."""
    request_id: str = ""
    """For logs."""
    sequence: int = 0
    """Which of the request's sequences; mixed into its random numbers."""
    num_prompt_tokens: int | None = None
    """How many of ``token_ids`` are the prompt; ``None`` for all."""
    structured: Spec | None = None
    """What the output must match."""
    normalize: bool | None = None
    """Pooling models: whether the embedding is scaled to length 1; ``None`` for what the model's authors do."""

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.token_ids) if self.num_prompt_tokens is None else self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Growth:
    """Blocks appended to a slot's table of one KV group."""

    slot: int
    group_id: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One block's content is copied to another of the same KV group."""

    group_id: int
    source: int
    target: int
    num_tokens: int
    """Leading tokens that matter; more may be copied."""


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """One chunk of one request."""

    slot: int
    start: int
    """Position of the chunk's first token; must equal the slot's computed tokens."""
    num_tokens: int
    """Real tokens; the rest of the chunk is padding."""
    sample: bool
    """Whether the chunk ends the known tokens and a next one is sampled."""


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """One token for each of some slots."""

    slots: Sequence[int]
    positions: Sequence[int]
    """Of each slot's input token; must equal its computed tokens."""
    bucket: int
    """Rows to run, at least the number of slots."""
    lease: int = 1
    """Such steps that may run in a row, each at the positions behind the last one's, before another plan comes."""

    def next(self) -> "DecodeWork":
        """The step behind this one."""
        return replace(self, positions=[position + 1 for position in self.positions])


@dataclass(frozen=True, slots=True)
class PoolWork:
    """All tokens of some slots, by a pooling model."""

    slots: Sequence[int]
    shape: PoolShape
    """What to run; at least as many rows as slots, and no slot has more tokens."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: release, copy, admit, grow, then the work."""

    step: int
    release: Sequence[int] = ()
    copies: Sequence[BlockCopy] = ()
    admit: Sequence[Admission] = ()
    grow: Sequence[Growth] = ()
    work: PrefillWork | DecodeWork | PoolWork | None = None


@dataclass(frozen=True, slots=True)
class Logprobs:
    """One token's log-probabilities: natural, of the distribution before any filter or temperature."""

    logprob: float
    rank: int
    """1 for the likeliest token of the vocabulary."""
    top_token_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()
    """The likeliest tokens, best first."""


@dataclass(frozen=True, slots=True)
class Output:
    """What a step produced for a slot, or why it produced nothing."""

    slot: int
    token_ids: Sequence[int]
    logprobs: Sequence[Logprobs] = field(default=())
    """One per token, if the request asked for them."""
    prompt_logprobs: Sequence[Logprobs] = ()
    """One per prompt token that a token of the step's chunk is followed by, if the request asked for them."""
    error: TriptychError | None = None
    """Why this slot alone failed; then there are no tokens."""
    pooled: Sequence[float] = ()
    """A pooling model's result."""
