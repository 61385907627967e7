"""A rank's part of a pipelined step: hidden states come from the stage before and go to the next one."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from protos.steps import Decode, Prefill, StepResult, slots_of
from worker_svc.devices.base import upload
from worker_svc.execution.batch import Batch
from worker_svc.graphs.graph_runner import RecordableModel
from worker_svc.ranks.group import RankGroup
from worker_svc.ranks.layout import RankLayout


class Model(RecordableModel, Protocol):
    """A generating model as runners see it; `vllm_adapter.model.VllmModel` implements it."""

    def bind_caches(self, caches: dict[str, torch.Tensor]) -> None:
        """Gives each attention layer its KV cache."""

    def attention_plans(self, groups: Sequence[tuple[Sequence[str], Any]]) -> dict[str, Any]:
        """Returns the metadata that `forward` takes, from each group's layer names and device plan."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits, float32 [rows, vocab], for hidden states [rows, hidden], on the device."""
        ...

    def empty_states(self, tokens: int) -> torch.Tensor:
        """Returns zeros of the shape that a stage of a pipeline receives for a step of that many tokens."""
        ...


@dataclass
class _Pending:
    """A step whose tokens the last stage has not reported yet."""

    work: Prefill | Decode
    gone: set[int] = field(default_factory=set)
    """Slots that were released meanwhile."""


class Stage:
    """The stage of one rank. For a replica of one stage it passes everything through."""

    def __init__(
        self,
        model: Model,
        batch: Batch,
        group: RankGroup | None,
        device: torch.device,
        *,
        most_tokens: int,
    ) -> None:
        """Starts with no step under way; the largest has `most_tokens` tokens."""
        self.layout = group.layout if group else RankLayout()
        """This rank's place."""
        self._batch = batch
        self._group = group
        self._device = device
        self._states = None if self.layout.is_first_stage else model.empty_states(most_tokens)
        self._pending: deque[_Pending] = deque()

    def padding(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the stage's first input for a step of padding, given the token ids [tokens]."""
        return tokens if self._states is None else self._states[:, : tokens.shape[0]].contiguous()

    def receive(self, tokens: int) -> tuple[torch.Tensor, ...]:
        """Returns what the stage before computed, [states, tokens, hidden]; nothing at the first stage."""
        if self._states is None:
            return ()
        assert self._group is not None
        names, _, hidden = self._states.shape
        return (self._group.links.receive(self._states.new_empty((names, tokens, hidden))),)

    def pass_on(self, work: Prefill | Decode, states: torch.Tensor) -> None:
        """Sends a step's hidden states to the next stage. Its result will be applied later."""
        assert self._group is not None
        self._group.links.send(states)
        self._pending.append(_Pending(work))

    def release(self, slot: int) -> None:
        """Notes that a slot is free: what steps under way still give it belongs to nothing."""
        for pending in self._pending:
            pending.gone.add(slot)

    def apply(self, result: StepResult) -> None:
        """Records the tokens of the oldest step without a result."""
        pending = self._pending.popleft()
        work = pending.work
        tokens = _tokens_by_slot(work, result)
        if isinstance(work, Prefill):
            if work.sample and work.slot not in pending.gone:
                first, *forced = tokens[work.slot]
                self._batch.advance_prefill(work, upload([first], self._device))
                self._append(work.slot, forced)
            return
        live = [slot for slot in work.slots if slot not in pending.gone]
        if not live:
            return
        values = upload([tokens[slot][0] for slot in live], self._device)
        self._batch.advance_rows(upload(live, self._device), values)
        self._batch.advance_decode(live)
        for slot in live:
            self._append(slot, tokens[slot][1:])

    def _append(self, slot: int, forced: Sequence[int]) -> None:
        if forced:
            self._batch.append(slot, forced)


def _tokens_by_slot(work: Prefill | Decode, result: StepResult) -> dict[int, Sequence[int]]:
    """Returns the tokens of each slot; token 0, as on the last stage, for one that got none."""
    slots = slots_of(work)
    if result.token_ids:
        return {slot: (token,) for slot, token in zip(slots, result.token_ids, strict=True)}
    given = {output.slot: output.token_ids for output in result.outputs}
    return {slot: given.get(slot) or (0,) for slot in slots}
