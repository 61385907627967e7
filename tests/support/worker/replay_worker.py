"""A worker without a real model for tests of seeded sampling: requests, grammars and their replay."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from protos.steps import Admission, Decode, Prefill, SlotOutput, StepPlan
from protos.triptych.v1 import common_pb2
from tests.support.sampling_params import constrained, sampling_params, thinking_budget
from tests.support.worker.layerless import GROUPS, LayerlessModel, PlainDevice
from worker_svc.execution.runner import Runner
from worker_svc.grammars.constraints import Constraints
from worker_svc.grammars.spec import Spec
from worker_svc.graphs.graph_runner import GraphOptions
from worker_svc.sampling.state import SamplingVocabulary
from worker_svc.shapes import ShapeConfig

VOCAB = 300
NEW = 12
"""Tokens that each request generates."""
SIZES = ShapeConfig(
    max_model_len=32, max_num_seqs=6, chunk=8, block_size=16, decode_buckets=(1, 2, 4, 8), num_blocks=(20, 10)
)


class Noise(LayerlessModel):
    """A model whose logits are noise that depends only on the last token and its position."""

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, plans: Mapping[str, Any], *_: torch.Tensor
    ) -> torch.Tensor:
        """Returns tokens and positions as hidden states."""
        del plans
        return torch.stack([token_ids, positions], dim=1).float()

    def empty_states(self, tokens: int) -> torch.Tensor:
        raise NotImplementedError("this model is no stage of a pipeline")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits peaked enough for filters to matter and flat enough for draws to differ."""
        angles = (hidden[:, :1] * 12.9898 + hidden[:, 1:] * 78.233) + torch.arange(VOCAB) * 37.719
        return torch.sin(angles * 1.7) * 3


class CapturingDevice(PlainDevice):
    """A CPU that captures like a GPU: arguments and results are fixed tensors that each run overwrites."""

    def capture(
        self, function: Callable[..., tuple[torch.Tensor, ...]], examples: Sequence[torch.Tensor]
    ) -> Callable[..., tuple[torch.Tensor, ...]]:
        """Runs the function once, then replays it on fixed tensors."""
        arguments = [tensor.clone() for tensor in examples]
        results = function(*arguments)

        def replay(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            for argument, tensor in zip(arguments, tensors, strict=True):
                argument.copy_(tensor)
            for result, new in zip(results, function(*arguments), strict=True):
                result.copy_(new)
            return results

        return replay


class RemainderMatcher:
    """A matcher for "divisor remainder …": token n must leave the n-th remainder, in turn."""

    may_end = ended = False

    def __init__(self, text: str, output: Sequence[int]) -> None:
        self.divisor, *self.remainders = map(int, text.split())
        self.count = 0
        assert all(self.accept(token) for token in output)

    def _allowed(self) -> list[int]:
        return list(range(self.remainders[self.count % len(self.remainders)], VOCAB, self.divisor))

    def accept(self, token: int) -> bool:
        taken = token in self._allowed()
        self.count += taken
        return taken

    def fill_mask(self, masks: torch.Tensor, row: int) -> None:
        words = masks[row].numpy().view(np.uint32)
        words[:] = 0
        for token in self._allowed():
            words[token >> 5] |= np.uint32(1 << (token & 31))

    def has_choice(self) -> bool:
        """Whether several tokens are allowed."""
        return self.divisor < VOCAB

    def take_chain(self, masks: torch.Tensor, row: int, room: int, min_tokens: int) -> tuple[int, ...]:
        """Takes two tokens, if only one each is allowed."""
        del masks, row, min_tokens
        if room < 2:
            return ()
        chain = tuple(self.remainders[(self.count + index) % len(self.remainders)] for index in range(2))
        assert all(self.accept(token) for token in chain)
        return chain

    def charge(self, seconds: float) -> None:
        """Does nothing: such a grammar has no budget."""

    def accept_forced_end(self, masks: torch.Tensor, row: int) -> None:
        """Does nothing: these texts have no end."""


class RemainderConstraints(Constraints):
    """Constraints with remainder matchers instead of compiled grammars."""

    def __init__(self) -> None:
        super().__init__(
            None,  # type: ignore[arg-type]
            num_slots=SIZES.max_num_seqs,
            max_rows=SIZES.decode_buckets[-1],
            vocab_size=VOCAB,
            end_ids=(),
            device=torch.device("cpu"),
            min_jump=1,
        )

    def admit(self, slot: int, spec: Spec, output: Sequence[int]) -> None:
        self._matchers[slot] = RemainderMatcher(spec.text, output)  # type: ignore[call-overload]
        self._count += 1


PLAIN = sampling_params(temperature=0.0)
REQUESTS: list[tuple[common_pb2.SamplingParams, list[int], str]] = [
    (sampling_params(seed=1), [5, 6, 7], ""),
    (sampling_params(seed=2, temperature=1.4, top_k=40, top_p=0.9, min_p=0.02), [1] * 11, ""),
    (sampling_params(seed=3, presence_penalty=1.5, frequency_penalty=0.7, repetition_penalty=1.3), [9, 8, 8], ""),
    (PLAIN, [4, 4], ""),
    (sampling_params(seed=5, logit_bias={4: 3.0, 9: -9.0}, bad_words=((4,), (7, 9)), min_tokens=6, logprobs=2), list(range(20)), ""),
    (sampling_params(seed=6, allowed_token_ids=tuple(range(0, VOCAB, 3)), frequency_penalty=2.0, top_p=0.8), [2, 3], ""),
    (sampling_params(temperature=0.0, repetition_penalty=1.8, logprobs=1), [33, 34], ""),
    (sampling_params(seed=8, temperature=0.7, top_p=0.5, logprobs=0), [44], ""),
    # Grammars that refuse most first draws: tokens are redrawn, or masked first if there are filters.
    (sampling_params(seed=9, logprobs=3), [51], "7 0 3 6"),
    (sampling_params(temperature=0.0, logprobs=3), [52], "40 39 1"),
    (sampling_params(seed=11, top_k=9, logit_bias={8: 2.0}, logprobs=1), [53], "5 4 3 2 1 0"),
    (sampling_params(seed=12, presence_penalty=2.0, min_tokens=4), [54], "30 0"),
    # Thoughts with budgets. Few tokens, so the model writes markers; a grammar that seldom allows the end.
    (sampling_params(seed=13, thinking_budget=thinking_budget(3, close=(7, 8, 9), end=(8,)), logprobs=1), [55], ""),
    (sampling_params(temperature=0.0, thinking_budget=thinking_budget(5), frequency_penalty=1.0), [56, 8], ""),
    (sampling_params(seed=15, allowed_token_ids=(3, 6, 7, 8, 9), thinking_budget=thinking_budget(2, opened=False)), [57], ""),
    (sampling_params(seed=16, top_k=9, thinking_budget=thinking_budget(4, close=(8, 9))), [58], "4 0 1 2 3"),
]  # fmt: skip
"""Parameters, prompt and grammar of each request."""


class ReplayWorker:
    """A runner whose requests are admitted, decoded and preempted by their index in `REQUESTS`."""

    def __init__(self, *, captured: bool = False) -> None:
        device = CapturingDevice() if captured else PlainDevice()
        self.constraints = RemainderConstraints()
        self.runner = Runner(
            Noise(), device, GROUPS, SIZES, vocabulary=SamplingVocabulary(VOCAB, (0, 1, 2)), options=GraphOptions(level=0),
            constraints=self.constraints,
        )  # fmt: skip
        if captured:
            self.runner.graphs.has = lambda signature: True  # type: ignore[method-assign]  # noqa: ARG005 - its name
        self.runner.warm_up(lambda *_: None)
        self.slots: dict[int, int] = {}
        self.logprobs: dict[int, list[common_pb2.TokenLogprobs]] = {}
        """The log-probabilities of each request's tokens on this worker."""
        self.step = 0

    def run(self, **fields: Any) -> list[SlotOutput]:
        self.step += 1
        return self.runner.execute(StepPlan(self.step, **fields))

    def admit(self, index: int, known: list[int], slot: int) -> None:
        """Prefills the known tokens and appends the next one."""
        self.slots[index] = slot
        sampling, prompt, grammar = REQUESTS[index]
        admit = [admission(slot, known, sampling, grammar, prompt=len(prompt))]
        outputs: list[SlotOutput] = []
        for start in range(0, len(known), SIZES.chunk):
            count = min(SIZES.chunk, len(known) - start)
            outputs = self.run(admit=admit, work=Prefill(slot, start, count, start + count == len(known)))
            admit = []
        self._take({index: known}, outputs)

    def decode(self, known: dict[int, list[int]]) -> None:
        """Decodes one token for each request and appends it."""
        slots = [self.slots[index] for index in known]
        bucket = next(size for size in SIZES.decode_buckets if size >= len(slots))
        self._take(known, self.run(work=Decode(tuple(slots), bucket)))

    def _take(self, known: dict[int, list[int]], outputs: list[SlotOutput]) -> None:
        for (index, each), output in zip(known.items(), outputs, strict=True):
            each.extend(output.token_ids)
            self.logprobs.setdefault(index, []).extend(output.logprobs)

    def release(self, index: int) -> None:
        self.run(release=(self.slots.pop(index),))


def admission(
    slot: int,
    known: Sequence[int],
    sampling: common_pb2.SamplingParams,
    grammar: str = "",
    *,
    prompt: int | None = None,
) -> Admission:
    """A request with the blocks of its slot."""
    params = constrained(sampling, "regex", grammar) if grammar else sampling
    blocks = {0: (1 + 2 * slot, 2 + 2 * slot), 1: (1 + slot,)}
    return Admission(slot, tuple(known), 0, params, blocks, num_prompt_tokens=prompt)
