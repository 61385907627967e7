"""A rank's part of a pipelined step: hidden states come from the previous stage and go to the next."""

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from protos.steps import Decode, Prefill, StepResult, slots_of
from worker_svc.devices.base import upload
from worker_svc.execution.batch import Batch
from worker_svc.graphs.graph_runner import RecordableModel
from worker_svc.ranks.group import RankGroup
from worker_svc.ranks.layout import RankLayout


class Model(RecordableModel, Protocol):
    """The runner's view of a generating model; `vllm_adapter.model.VllmModel` implements it."""

    def bind_caches(self, caches: dict[str, torch.Tensor]) -> None:
        """Gives each attention layer its KV cache."""

    def attention_plans(self, groups: Sequence[tuple[Sequence[str], Any]]) -> dict[str, Any]:
        """Returns the metadata for `forward`, from each group's layer names and device plan."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits, float32 [rows, vocab], for hidden states [rows, hidden], on the device."""
        ...

    def empty_states(self, tokens: int) -> torch.Tensor:
        """Returns zeros of the shape of a later stage's input, for a step of so many tokens."""
        ...


class Stage:
    """The stage of one rank. For a replica of one stage it passes everything through."""

    def __init__(
        self,
        model: Model,
        batch: Batch,
        group: RankGroup | None,
        device: torch.device,
        *,
        states_device: torch.device,
        most_tokens: int,
    ) -> None:
        """Starts with no step under way.

        Args:
            model: the model.
            batch: the batch, on `device`.
            group: the joined ranks; `None` for a lone rank.
            device: the device of tokens.
            states_device: the device of received hidden states.
            most_tokens: those of the largest step.
        """
        self.layout = group.layout if group else RankLayout()
        """This rank's place."""
        self._batch = batch
        self._group = group
        self._device = device
        self._states_device = states_device
        self._states = None if self.layout.is_first_stage else model.empty_states(most_tokens)
        # Steps without a report from the last stage, with the slots released meanwhile.
        self._pending: deque[tuple[Prefill | Decode, set[int]]] = deque()

    def padding(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the stage's first input for a step of padding, given the token ids [tokens]."""
        return tokens if self._states is None else self._states[:, : tokens.shape[0]].contiguous()

    def receive(self, tokens: int) -> tuple[torch.Tensor, ...]:
        """Returns the previous stage's result, [states, tokens, hidden]; nothing at the first stage."""
        if self._states is None:
            return ()
        assert self._group is not None
        names, _, hidden = self._states.shape
        states = self._states.new_empty((names, tokens, hidden), device=self._states_device)
        return (self._group.links.receive(states),)

    def pass_on(self, work: Prefill | Decode, states: torch.Tensor) -> None:
        """Sends a step's hidden states to the next stage. Its result will be applied later."""
        assert self._group is not None
        self._group.links.send(states)
        self._pending.append((work, set()))

    def release(self, slot: int) -> None:
        """Notes a free slot: its tokens from steps under way will be dropped."""
        for _, gone in self._pending:
            gone.add(slot)

    def apply(self, result: StepResult) -> None:
        """Records the tokens of the oldest step without a result."""
        work, gone = self._pending.popleft()
        tokens = _tokens_by_slot(work, result)
        if isinstance(work, Prefill):
            if work.sample and work.slot not in gone:
                first, *forced = tokens[work.slot]
                self._batch.advance_prefill(work, upload([first], self._device))
                self._append(work.slot, forced)
            return
        live = [slot for slot in work.slots if slot not in gone]
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
    """Returns the tokens of each slot; token 0, as on the last stage, if it got none."""
    slots = slots_of(work)
    if result.token_ids:
        return {slot: (token,) for slot, token in zip(slots, result.token_ids, strict=True)}
    given = {output.slot: output.token_ids for output in result.outputs}
    return {slot: given.get(slot) or (0,) for slot in slots}
