"""Pooling models: a result per prompt, in static shapes and graphs, without a KV cache."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.nn import functional

from protos.errors import Internal, NotFinite
from protos.steps import Admission, Pool, PoolShape, SlotOutput, StepPlan, without_slots
from worker_svc.devices.base import Device
from worker_svc.graphs.graph_runner import GraphOptions, GraphRunner, GraphSignature, Inputs, RecordableModel
from worker_svc.pending_step import PendingStep
from worker_svc.phases import Progress, one_by_one
from worker_svc.shapes import Activation, PoolingDescription, PoolingMethod, PoolShapeConfig


def pool_rows(hidden: torch.Tensor, lengths: torch.Tensor, method: PoolingMethod) -> torch.Tensor:
    """Pools the real tokens of each row. The contents of padding, NaN included, have no effect.

    Args:
        hidden: [rows, row_len, hidden].
        lengths: int64 [rows], the number of real tokens at the start of each row, at least 1.
        method: how to pool.

    Returns:
        float32 [rows, hidden], or [rows, row_len, hidden] for all tokens.
    """
    match method:
        case "CLS":
            return hidden[:, 0].float()
        case "LAST":
            # PyTorch marks indexing as an operator with data-dependent shapes, which a graph cannot contain.
            last = (lengths - 1)[:, None, None].expand(-1, 1, hidden.shape[-1])
            return hidden.gather(1, last)[:, 0].float()
        case "MEAN":
            padding = torch.arange(hidden.shape[1], device=hidden.device) >= lengths[:, None]
            total = hidden.float().masked_fill(padding[:, :, None], 0).sum(dim=1)
            return total / lengths[:, None]
        case "ALL":
            return hidden.float()


def pool_packed(
    hidden: torch.Tensor, places: torch.Tensor, text_of: torch.Tensor, method: PoolingMethod
) -> torch.Tensor:
    """Pools consecutive texts. The contents of padding have no effect.

    Args:
        hidden: [tokens, hidden].
        places: int64 [3, texts]; see `RecordableModel`.
        text_of: int64 [tokens], each token's text; for padding the number of texts.
        method: how to pool.

    Returns:
        float32 [texts, hidden], or [tokens, hidden] for all tokens. Texts without tokens mean nothing.
    """
    lengths, starts = places[0], places[2]
    match method:
        case "CLS":
            return hidden.index_select(0, starts.clamp(max=hidden.shape[0] - 1)).float()
        case "LAST":
            return hidden.index_select(0, (starts + lengths - 1).clamp(min=0)).float()
        case "MEAN":
            # The last sum is that of padding.
            empty = torch.zeros(
                (lengths.shape[0] + 1, hidden.shape[1]), dtype=torch.float32, device=hidden.device
            )
            total = empty.index_add(0, text_of, hidden.float())[:-1]
            return total / lengths.clamp(min=1)[:, None]
        case "ALL":
            return hidden.float()


def activate(vectors: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Applies the activation along the last dimension of float32 vectors [..., size]."""
    match activation:
        case "normalize":
            return functional.normalize(vectors, p=2, dim=-1)
        case "softmax":
            return functional.softmax(vectors, dim=-1)
        case "sigmoid":
            return torch.sigmoid(vectors)


class PoolingModel(RecordableModel, Protocol):
    """The runner's view of a model; `vllm_adapter.model.VllmModel` implements it."""

    def row_plans(self, lengths: torch.Tensor, row_len: int | None, /) -> dict[str, Any]:
        """Returns the metadata for `forward`: of lengths [rows] in rows of `row_len`, or of packed texts."""
        ...


Step = Callable[..., tuple[torch.Tensor, ...]]
"""From token ids [tokens] and places [2, rows] or [3, texts] to the result of
`RecordableModel.forward`, valid until the next call."""


class PoolRunner:
    """A pooling model and the prompts in its slots. Not thread-safe: a single thread runs all plans."""

    graphs: GraphRunner
    """The graphs of the steps."""

    def __init__(
        self,
        model: PoolingModel,
        device: Device,
        description: PoolingDescription,
        shapes: PoolShapeConfig,
        options: GraphOptions | None = None,
    ) -> None:
        """Allocates nothing. The weights are loaded; without options, the device's default level applies."""
        self._model = model
        self._device = device
        self._description = description
        self._shapes = shapes.pool_shapes
        self._longest = max(shape.prompt_len for shape in shapes.pool_shapes)
        self._slots: dict[int, Admission] = {}
        self._steps: dict[GraphSignature, Step] = {}
        self.graphs = GraphRunner(model, device, options or GraphOptions(level=device.default_level))

    def signatures(self) -> list[GraphSignature]:
        """Returns every kind of step in plans."""
        return [_signature(shape) for shape in self._shapes]

    @torch.inference_mode()
    def make_graphs(self, progress: Progress) -> None:
        """Makes the graph of every shape.

        Raises:
            ConfigurationRefused: if a graph cannot be made but is required.
        """
        for signature in one_by_one(self.signatures(), progress):
            self._make(signature)

    @torch.inference_mode()
    def warm_up(self, progress: Progress) -> None:
        """Runs every shape once, on padding only."""
        for signature in one_by_one(self.signatures(), progress):
            self._pool([], PoolShape(signature.query_len, signature.batch, signature.packed))

    def execute(self, plan: StepPlan) -> list[SlotOutput]:
        """Runs a step; returns the refused admissions, then an output for each slot of the work."""
        return self.launch(plan).wait()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Runs a step. A request fails alone if its admission is refused or its result is not finite.

        Raises:
            Internal: if the plan contradicts earlier plans.
        """
        for slot in plan.release:
            self._slots.pop(slot, None)
        refused: dict[int, SlotOutput] = {}
        for request in plan.admit:
            if (error := self._admit(request)) is not None:
                refused[request.slot] = SlotOutput(request.slot, (), error=error)
        work = without_slots(plan.work, refused)
        if work is None:
            return PendingStep(refused=list(refused.values()))
        if not isinstance(work, Pool):
            raise Internal("the plan generates tokens, but this is a pooling model")
        requests = self._requests_of(work)
        results = self._finish(requests, self._pool(requests, work.shape), is_packed=work.shape.packed)
        outputs = [_output(request.slot, row) for request, row in zip(requests, results, strict=True)]
        return PendingStep(work, list(refused.values()), outputs)

    def reset(self) -> None:
        """Frees every slot."""
        self._slots.clear()

    def close(self) -> None:
        """Drops the captured steps: they reference the runner and keep its graphs' memory in use."""
        self._steps.clear()

    def _admit(self, request: Admission) -> Internal | None:
        if request.slot in self._slots:
            return Internal(f"the plan admits a request to slot {request.slot}, which is taken")
        if not 1 <= len(request.token_ids) <= self._longest:
            return Internal(
                f"the plan admits {len(request.token_ids)} tokens to slot {request.slot};"
                f" 1 to {self._longest} fit"
            )
        self._slots[request.slot] = request
        return None

    def _requests_of(self, work: Pool) -> list[Admission]:
        """Returns the admitted requests of a step, checked against its shape."""
        shape = work.shape
        if shape not in self._shapes or len(work.slots) > shape.batch:
            raise Internal(f"the plan pools {len(work.slots)} slots in {shape} tokens")
        if len(set(work.slots)) != len(work.slots):
            raise Internal("the plan names a slot twice")
        requests = []
        for slot in work.slots:
            request = self._slots.get(slot)
            if request is None:
                raise Internal(f"the plan names slot {slot}, which is free")
            if len(request.token_ids) > shape.prompt_len:
                raise Internal(
                    f"slot {slot} has {len(request.token_ids)} tokens; a row holds {shape.prompt_len}"
                )
            requests.append(request)
        if (total := sum(len(request.token_ids) for request in requests)) > shape.num_tokens:
            raise Internal(f"the plan pools {total} tokens in {shape} tokens")
        return requests

    def _make(self, signature: GraphSignature) -> None:
        """Makes a signature's graph, and captures the step around it if the device captures.

        The graph is made of single tokens, and compared with the model on texts as large as the shape.
        """
        row_len = None if signature.packed else signature.query_len
        short, full = (self._upload(*_example(signature, fills=fills)) for fills in (False, True))

        def with_plans(tokens: torch.Tensor, places: torch.Tensor) -> Inputs:
            return tokens, places, self._model.row_plans(places[0], row_len)

        self.graphs.build(signature, *with_plans(*short), other=with_plans(*full))

        def step(tokens: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor]:
            return (self.graphs.run(signature, *with_plans(tokens, places)),)

        is_captured = self._device.captures and self.graphs.has(signature)
        self._steps[signature] = self._device.capture(step, short) if is_captured else step

    def _pool(self, requests: Sequence[Admission], shape: PoolShape) -> torch.Tensor:
        """Returns the model's result for requests that fit `shape`, on the host.

        The remaining rows are padding and left out.
        """
        signature = _signature(shape)
        if signature not in self._steps:
            self.graphs.count_late(signature)
            self._make(signature)
        (result,) = self._steps[signature](*self._upload(*_inputs(requests, signature)))
        on_host = result.cpu()
        return on_host if shape.packed and self._description.of_tokens else on_host[: len(requests)]

    def _finish(
        self, requests: Sequence[Admission], raw: torch.Tensor, *, is_packed: bool
    ) -> list[torch.Tensor]:
        """Returns each request's values, float32 [size] or [tokens, size], cut and activated as it asks."""
        wishes = [self._wish(request) for request in requests]
        # Nearly always, all requests want the same.
        made = {}
        for size, active in set(wishes):
            cut = raw[..., :size]
            activation = self._description.activation
            made[size, active] = activate(cut, activation) if active and activation else cut
        if not self._description.of_tokens:
            return [made[wish][index] for index, wish in enumerate(wishes)]
        found, start = [], 0
        for index, (request, wish) in enumerate(zip(requests, wishes, strict=True)):
            count = len(request.token_ids)
            if is_packed:
                found.append(made[wish][start : start + count])
            else:
                found.append(made[wish][index, :count])
            start += count
        return found

    def _wish(self, request: Admission) -> tuple[int, bool]:
        asked, description = request.pooling, self._description
        active = description.activates
        if asked is not None and asked.HasField("use_activation"):
            active = asked.use_activation
        return (asked and asked.dimensions) or description.size, active

    def _upload(self, tokens: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        device = self._device.torch_device
        return tokens.to(device), places.to(device)


def _signature(shape: PoolShape) -> GraphSignature:
    return GraphSignature("pooling", shape.batch, shape.prompt_len, packed=shape.packed)


def _inputs(requests: Sequence[Admission], signature: GraphSignature) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token ids, int64 [tokens], and places, int64 [2, rows] or [3, texts]; see `RecordableModel`.

    A row of padding is a single token, a text of padding none.
    """
    size, batch, packed = signature.query_len, signature.batch, signature.packed
    tokens = torch.zeros(size if packed else batch * size, dtype=torch.int64)
    places = torch.full((3 if packed else 2, batch), 0 if packed else 1, dtype=torch.int64)
    places[1] = size
    for row, request in enumerate(requests):
        places[0, row] = count = len(request.token_ids)
        if request.pooling is not None and request.pooling.second_text_at:
            places[1, row] = request.pooling.second_text_at
        if not packed:
            tokens[row * size : row * size + count] = torch.tensor(request.token_ids, dtype=torch.int64)
    if packed:
        ids = [token for request in requests for token in request.token_ids]
        tokens[: len(ids)] = torch.tensor(ids, dtype=torch.int64)
        places[2] = places[0].cumsum(0) - places[0]
    return tokens, places


def _example(signature: GraphSignature, *, fills: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens and places of texts that fill the shape together, or of single tokens.

    None is the second text of a pair: not every model distinguishes two types of tokens.
    """
    size, batch = signature.query_len, signature.batch
    # No vocabulary is smaller than 8 tokens.
    tokens = torch.arange(size if signature.packed else batch * size) % 8
    if not signature.packed:
        return tokens, torch.tensor([[size if fills else 1] * batch, [size] * batch])
    texts = min(batch, size)
    first = size - (texts - 1) * (size // texts) if fills else 1
    others = size // texts if fills else 1
    places = torch.zeros((3, batch), dtype=torch.int64)
    places[0, 0], places[0, 1:texts] = first, others
    places[1] = size
    places[2] = places[0].cumsum(0) - places[0]
    return tokens, places


def _output(slot: int, row: torch.Tensor) -> SlotOutput:
    values: list[float] = row.flatten().tolist()
    # A sum of float32 values in float64 is finite unless one of them is not.
    if not math.isfinite(sum(values)):
        return SlotOutput(slot, (), error=NotFinite("the model computed NaN or infinity"))
    return SlotOutput(slot, (), pooled=values)
