"""The graphs that a worker runs: one a signature, all of them made before it serves."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from protos.errors import ConfigurationRefused, Internal
from protos.logs import get_logger
from worker_svc.devices.base import Device
from worker_svc.graphs.capture import NotStatic, Recording
from worker_svc.graphs.inductor import Compiler, GeneratedGraph
from worker_svc.graphs.replay import KernelGraph, kernels_of


@dataclass(frozen=True)
class DeviceGraph:
    """A step of a device that compiles whole models by itself: the model's forward is compiled code already."""

    model: "RecordableModel"
    num_kernels: int = 0
    num_bytes: int = 0

    def replay(self, inputs: Sequence[torch.Tensor], plans: Mapping[str, Any]) -> torch.Tensor:
        """Runs the step; see ``KernelGraph.replay``."""
        tokens, positions = inputs
        return self.model.forward(tokens, positions, plans)


Graph = KernelGraph | GeneratedGraph | DeviceGraph
# From this level on, kernels are generated.
GENERATED = 2
# How far a row's state may be from the model's own, as a share of its length: generated kernels round in other places.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class Signature:
    """What distinguishes one graph of a model from another."""

    kind: Literal["prefill", "decode"]
    batch: int
    """Rows."""
    query_len: int
    """Tokens of each row."""

    def __str__(self) -> str:
        """For people."""
        return (
            f"prefill of {self.query_len} tokens"
            if self.kind == "prefill"
            else f"decode of {self.batch} rows"
        )


class RecordableModel(Protocol):
    """What graphs ask of a model; ``vllm_adapter.engine.VllmModel`` is one."""

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, plans: Mapping[str, Any]
    ) -> torch.Tensor:
        """Hidden states [tokens, hidden] of token ids [tokens]."""
        ...

    def record(self, token_ids: torch.Tensor, positions: torch.Tensor) -> Recording:
        """Records :meth:`forward` on tensors of these shapes; raises ``NotStatic``."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, float32 [rows, vocab], of hidden states [rows, hidden]."""
        ...


@dataclass(frozen=True)
class GraphOptions:
    """How graphs are made."""

    level: int = 1
    """0: none, the model's own Python code runs. 1: the device's kernels, replayed, or what the device's own compiler makes. 2: generated
    kernels. 3: the fastest of several."""
    sizes: tuple[int, ...] | None = None
    """Decode buckets that kernels are generated for; ``None`` for all. The others are replayed."""
    required: bool = False
    """Whether a step that cannot be made a graph is an error."""
    strict: bool = False
    """Whether to make a graph while serving is an error, and a step without one too."""


@dataclass(frozen=True)
class Took:
    """Seconds that a graph took to make."""

    capture: float
    """Recording the model's step."""
    compile: float
    """Making kernels of it."""
    first_run: float
    """Running it once and holding it against the model."""


class Graphs:
    """Runs a model's steps as graphs, or as the model's own Python code where that is asked for.

    Attributes:
        num_late: graphs that were made while serving. Each of them made a request wait.
        took: what each graph took to make.
        observe: if set, told of each kernel's operator and seconds while a step is replayed, which takes longer then.
    """

    def __init__(self, model: RecordableModel, device: Device, options: GraphOptions) -> None:
        """Starts without graphs.

        Args:
            model: whose caches are bound before the first graph is made.
            device: that it runs on.
            options: how.
        """
        self._model = model
        self._device = device
        self._options = options
        self._compiler = Compiler(options.level)
        self._graphs: dict[Signature, Graph | None] = {}
        self._warm = False
        self._log = get_logger()
        self.took: dict[Signature, Took] = {}
        self.num_late = 0
        self.observe: Callable[[str, float], None] | None = None

    @property
    def num_compiled(self) -> int:
        """What a compiler was called for: pieces that no cache had, or graphs whose compiler knows what it has."""
        by_device = sum(isinstance(graph, DeviceGraph) for graph in self._graphs.values())
        return self._compiler.num_misses + by_device

    def has(self, signature: Signature) -> bool:
        """Whether a graph was made."""
        return self._graphs.get(signature) is not None

    def run(
        self, signature: Signature, tokens: torch.Tensor, positions: torch.Tensor, plans: Mapping[str, Any]
    ) -> torch.Tensor:
        """Hidden states [tokens, hidden], valid until the next step of the same signature."""
        graph = self._graphs.get(signature)
        if graph is None:
            return self._model.forward(tokens, positions, plans)
        if self.observe is None or not isinstance(graph, KernelGraph):
            return graph.replay((tokens, positions), plans)
        hidden, timed = graph.profile((tokens, positions), plans, self._device.synchronize)
        for operator, seconds in timed:
            self.observe(operator, seconds)
        return hidden

    def note_late(self, signature: Signature) -> None:
        """Counts a graph that is about to be made while serving, if it is.

        Raises:
            Internal: in strict mode.
        """
        if not self._warm or not self._options.level or signature in self._graphs:
            return
        self.num_late += 1
        if self._options.strict:
            raise Internal(f"no graph was made for {signature} before serving, and --compile-strict is set")
        self._log.warning("graph_made_late", signature=str(signature), late=self.num_late)

    def make(
        self, signature: Signature, tokens: torch.Tensor, positions: torch.Tensor, plans: Mapping[str, Any]
    ) -> None:
        """Makes the graph of a signature, if it is missing, and holds it against the model's own forward.

        Args:
            signature: of the graph.
            tokens: padding, of its shape.
            positions: like ``tokens``.
            plans: of a step of padding: the model is run more than once, and a window that slides in place would slide each time.

        Raises:
            ConfigurationRefused: if the step is not static, and that was not left to us; or if it does not compile.
        """
        if not self._options.level or signature in self._graphs:
            return
        if self._device.has_own_compiler:
            self._graphs[signature] = self._compiled_by_device(signature, tokens, positions, plans)
            return
        started = time.perf_counter()
        graph: Graph | None = None
        try:
            recording = self._model.record(tokens, positions)
            recorded = time.perf_counter()
            graph = self._lower(signature, recording)
            compiled = time.perf_counter()
            self._check(graph, tokens, positions, plans)
            checked = time.perf_counter()
            self.took[signature] = Took(recorded - started, compiled - recorded, checked - compiled)
        except NotStatic as error:
            message = f"no graph for {signature}: {error}"
            if self._options.required or self._options.strict:
                raise ConfigurationRefused(f"{message}; use --backend eager") from error
            self._log.warning("graph_missing", signature=str(signature), reason=str(error))
            graph = None
        self._graphs[signature] = graph

    def _compiled_by_device(
        self, signature: Signature, tokens: torch.Tensor, positions: torch.Tensor, plans: Mapping[str, Any]
    ) -> DeviceGraph:
        started = time.perf_counter()
        try:
            hidden = self._model.forward(tokens, positions, plans)
            self._model.logits(hidden[:1] if signature.kind == "prefill" else hidden)
        except Exception as error:  # whatever a compiler raises
            reason = getattr(error, "message", None) or f"{type(error).__name__}: {_first_line(error)}"
            raise ConfigurationRefused(f"the graph for {signature} does not compile ({reason})") from error
        self.took[signature] = Took(0.0, time.perf_counter() - started, 0.0)
        return DeviceGraph(self._model)

    def finish(self) -> None:
        """From now on a graph that is missing is a defect."""
        self._warm = True
        made = [graph for graph in self._graphs.values() if graph is not None]
        if made:
            took = self.took.values()
            self._log.info(
                "graphs_made", graphs=len(made), level=self._options.level,
                capture_s=round(sum(each.capture for each in took), 2),
                compile_s=round(sum(each.compile for each in took), 2),
                first_run_s=round(sum(each.first_run for each in took), 2),
                structures=self._compiler.num_structures, compiled=self._compiler.num_misses,
                memory_mib=round(self.num_bytes / 2**20, 1),
                kernels=max(graph.num_kernels for graph in made),
                signatures={
                    str(signature): [round(each.capture, 2), round(each.compile, 2), round(each.first_run, 2)]
                    for signature, each in self.took.items()
                },
            )  # fmt: skip

    @property
    def num_bytes(self) -> int:
        """Memory that all graphs have for themselves."""
        return sum(graph.num_bytes for graph in self._graphs.values() if graph is not None)

    def _lower(self, signature: Signature, recording: Recording) -> Graph:
        """Raises ConfigurationRefused: if the compiler fails."""
        sizes = self._options.sizes
        if self._options.level < GENERATED or (
            signature.kind == "decode" and sizes is not None and signature.batch not in sizes
        ):
            return kernels_of(recording, self._device)
        try:
            return GeneratedGraph(recording, self._device, self._compiler)
        except Exception as error:  # whatever a compiler raises
            raise ConfigurationRefused(
                f"the graph for {signature} does not compile ({type(error).__name__}: {_first_line(error)}); -O 1 does without a compiler"
            ) from error

    def _check(
        self, graph: Graph, tokens: torch.Tensor, positions: torch.Tensor, plans: Mapping[str, Any]
    ) -> None:
        """Does nothing if the graph says what the model says of other tokens than those it was recorded with.

        All rows get the same token: they may share a place in the cache, and which of them is there last is left to chance.

        Raises:
            NotStatic: if it does not.
        """
        others, places = torch.full_like(tokens, 7), positions + 1
        expected = self._model.forward(others, places, plans)
        got = graph.replay((others, places), plans)
        if isinstance(graph, KernelGraph):
            same = torch.allclose(got, expected, rtol=0, atol=0, equal_nan=True)
        else:
            wide = expected.float()
            off = (got.float() - wide).norm(dim=-1)
            same = bool((off <= _TOLERANCE.get(expected.dtype, 0.0) * wide.norm(dim=-1)).all())
        if not same:
            raise NotStatic(
                "a replay differs from the model's own forward, so what it does depends on its data"
            )


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
