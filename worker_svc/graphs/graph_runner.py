"""A worker's graphs, one for each signature, all built before it serves."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from protos.errors import ConfigurationRefused, Internal
from protos.service.logs import get_logger
from worker_svc.devices.base import Device
from worker_svc.graphs.capture import NotStatic, Recording
from worker_svc.graphs.inductor import InductorGraph, SubgraphCompiler
from worker_svc.graphs.replay import KernelGraph, build_kernel_graph


@dataclass(frozen=True)
class DeviceGraph:
    """A step on a device with a compiler of whole models."""

    run: Callable[..., torch.Tensor]
    """The compiled forward; see `Device.bind`."""
    num_kernels: int = 0
    """Unknown."""
    num_bytes: int = 0
    """Unknown."""

    def replay(self, inputs: Sequence[torch.Tensor], plans: Mapping[str, Any]) -> torch.Tensor:
        """Runs the step; see `KernelGraph.replay`. The device has written its plans where the graph reads."""
        del plans
        return self.run(*inputs)


Graph = KernelGraph | InductorGraph | DeviceGraph
Inputs = tuple[torch.Tensor, torch.Tensor, Mapping[str, Any]]
"""Tokens, places and plans of a step; see `RecordableModel`."""
INDUCTOR_LEVEL = 2
"""The lowest optimization level at which TorchInductor compiles kernels."""
# By the narrowest dtype of a step's kernels, how far a row of compiled results may be from the model's own,
# relative to its norm: compiled kernels round elsewhere.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class GraphSignature:
    """Identifies a graph of a model."""

    kind: Literal["prefill", "decode", "pooling"]
    """The kind of step."""
    batch: int
    """Rows."""
    query_len: int
    """Tokens of each row."""
    adapters: bool = False
    """Whether rows may have LoRA adapters. The graph without them costs nothing for them."""
    packed: bool = False
    """Whether texts are packed: `batch` is their maximal number, `query_len` their tokens in all."""

    def __str__(self) -> str:
        """Describes the signature for people."""
        adapters = " with adapters" if self.adapters else ""
        match self.kind:
            case "prefill":
                return f"prefill of {self.query_len} tokens{adapters}"
            case "decode":
                return f"decode of {self.batch} rows{adapters}"
            case "pooling" if self.packed:
                return f"pooling of {self.batch} packed texts in {self.query_len} tokens"
            case "pooling":
                rows = "row" if self.batch == 1 else "rows"
                return f"pooling of {self.batch} {rows} of {self.query_len} tokens"


class RecordableModel(Protocol):
    """The graphs' view of a model; `vllm_adapter.model.VllmModel` implements it.

    A step takes token ids [tokens] and their places: positions [tokens] of a generating model. A pooling
    model's places are [2, rows]: the number of each row's real tokens, and the index in the row of the
    second text of a pair, or the row's length. If texts are packed, places are [3, texts]: a text stands for
    a row, and the third number is the index of its first token in the step. Texts without tokens come last
    and start at the first token of padding. A step with LoRA adapters takes their selection, too.
    """

    def forward(
        self,
        token_ids: torch.Tensor,
        places: torch.Tensor,
        plans: Mapping[str, Any],
        /,
        *adapters: torch.Tensor,
    ) -> torch.Tensor:
        """Returns hidden states [tokens, hidden], or a pooling model's result.

        The latter is float32 [rows, size], or [rows, row_len, size] for a result per token. Packed texts
        give [texts, size] or [tokens, size].
        """
        ...

    def record(self, token_ids: torch.Tensor, places: torch.Tensor, /, *adapters: torch.Tensor) -> Recording:
        """Records `forward` on tensors of these shapes; raises `NotStatic`."""
        ...


@dataclass(frozen=True)
class GraphOptions:
    """How graphs are built."""

    level: int = 1
    """0: no graphs, the model's Python code runs. 1: the device's kernels replayed, or the output of the
    device's own compiler. 2: compiled kernels. 3: compiled kernels, tuned."""
    sizes: tuple[int, ...] | None = None
    """Decode buckets to compile kernels for; `None` for all. The others are replayed."""
    required: bool = False
    """Whether a step unfit for a graph is an error."""
    strict: bool = False
    """Whether a step without a graph is an error, and a graph built while serving, too, after a full
    warm-up."""
    checked: frozenset[str] = frozenset()
    """Signatures, in words, whose replay an earlier process compared with the model."""


@dataclass(frozen=True)
class BuildTimes:
    """Seconds of building a graph."""

    capture: float
    """Recording the model's step."""
    compile: float
    """Building the kernels."""
    first_run: float
    """Running the graph once and comparing it with the model; 0 if an earlier process did."""


class GraphRunner:
    """Runs a model's steps as graphs, or as the model's own Python code at level 0."""

    num_late: int
    """Graphs built while serving; each made a request wait."""
    build_times: dict[GraphSignature, BuildTimes]
    """By signature, the cost of building its graph."""

    def __init__(
        self,
        model: RecordableModel,
        device: Device,
        options: GraphOptions,
        *,
        logits: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        """Starts without graphs.

        Args:
            model: its caches must be bound before the first graph is built.
            device: the model's.
            options: how graphs are built.
            logits: from hidden states [rows, hidden] to logits and more; a device with its own compiler
                compiles it, too. `None` for a model without.
        """
        self._model = model
        self._logits = logits
        self._device = device
        self._options = options
        self._compiler = SubgraphCompiler(options.level)
        self._graphs: dict[GraphSignature, Graph | None] = {}
        self._serving = False
        self._is_late_an_error = False
        self._log = get_logger()
        self.build_times = {}
        self.num_late = 0

    @property
    def num_compiled(self) -> int:
        """Compilations: subgraphs missing in caches, and all graphs of a device with its own compiler."""
        by_device = sum(isinstance(graph, DeviceGraph) for graph in self._graphs.values())
        return self._compiler.num_misses + by_device

    @property
    def num_bytes(self) -> int:
        """Memory of the graphs, bytes."""
        return sum(graph.num_bytes for graph in self._graphs.values() if graph is not None)

    @property
    def checked(self) -> frozenset[str]:
        """The signatures, in words, whose replay is known to equal the model."""
        return frozenset(
            str(signature) for signature, graph in self._graphs.items() if isinstance(graph, KernelGraph)
        )

    def has(self, signature: GraphSignature) -> bool:
        """Whether the signature has a graph."""
        return self._graphs.get(signature) is not None

    def takes_plans(self, signature: GraphSignature) -> bool:
        """Whether a step of the signature reads its plans by layer, or where the device wrote them."""
        return not isinstance(self._graphs.get(signature), DeviceGraph)

    def is_exact(self, signature: GraphSignature) -> bool:
        """Whether there is a graph with results independent of the partition into steps."""
        graph = self._graphs.get(signature)
        return isinstance(graph, KernelGraph) and graph.is_exact

    def run(
        self,
        signature: GraphSignature,
        tokens: torch.Tensor,
        places: torch.Tensor,
        plans: Mapping[str, Any],
        *adapters: torch.Tensor,
    ) -> torch.Tensor:
        """Runs a step; for the arguments see `build`.

        Returns the result of the model's `forward`, valid until the next step of the same signature.
        """
        graph = self._graphs.get(signature)
        if graph is None:
            return self._model.forward(tokens, places, plans, *adapters)
        return graph.replay((tokens, places, *adapters), plans)

    def count_late(self, signature: GraphSignature) -> None:
        """Counts the signature's graph as late if it is still to be built although the worker serves.

        Raises:
            Internal: in strict mode after a warm-up.
        """
        if not self._serving or not self._options.level or signature in self._graphs:
            return
        self.num_late += 1
        if self._is_late_an_error:
            raise Internal(f"{signature} has no graph from before serving, and --compile-strict is set")
        self._log.warning("graph_built_late", signature=str(signature), late=self.num_late)

    def build(
        self,
        signature: GraphSignature,
        tokens: torch.Tensor,
        places: torch.Tensor,
        plans: Mapping[str, Any],
        *adapters: torch.Tensor,
        other: Inputs | None = None,
    ) -> None:
        """Builds the graph of a signature if it is missing, and compares it with the model's own forward.

        Replays compared by an earlier process are not compared again.

        Args:
            signature: the graph's.
            tokens: padding, of the graph's shape.
            places: of these tokens; see `RecordableModel`.
            plans: of a step of padding. The model runs more than once, and a window in place would slide
                each time.
            *adapters: the selection of LoRA adapters, for a signature with adapters.
            other: a step with other contents for the comparison; `None` for another token and the next
                positions.

        Raises:
            ConfigurationRefused: if the options require a graph and the step is not static, or does not
                compile.
        """
        if not self._options.level or signature in self._graphs:
            return
        if self._device.has_own_compiler:
            self._graphs[signature] = self._compile_on_device(signature, tokens, places, plans, *adapters)
            return
        started = time.perf_counter()
        graph: Graph | None = None
        try:
            recording = self._model.record(tokens, places, *adapters)
            recorded = time.perf_counter()
            graph = self._lower(signature, recording)
            compiled = time.perf_counter()
            if not (isinstance(graph, KernelGraph) and str(signature) in self._options.checked):
                # All rows get the same token: padded rows share a place in the cache, and the order of their
                # writes is arbitrary.
                trial = other or (torch.full_like(tokens, 7), places + 1, plans)
                self._check(graph, recording, trial, *adapters)
            checked = time.perf_counter()
            self.build_times[signature] = BuildTimes(
                recorded - started, compiled - recorded, checked - compiled
            )
        except NotStatic as error:
            message = f"no graph for {signature}: {error}"
            if self._options.required or self._options.strict:
                raise ConfigurationRefused(f"{message}; use --backend eager") from error
            self._log.warning("graph_missing", signature=str(signature), reason=str(error))
            graph = None
        self._graphs[signature] = graph

    def _compile_on_device(
        self,
        signature: GraphSignature,
        tokens: torch.Tensor,
        places: torch.Tensor,
        plans: Mapping[str, Any],
        *adapters: torch.Tensor,
    ) -> DeviceGraph:
        def forward(tokens: torch.Tensor, places: torch.Tensor, *adapters: torch.Tensor) -> torch.Tensor:
            return self._model.forward(tokens, places, plans, *adapters)

        started = time.perf_counter()
        try:
            run, hidden = self._device.bind(forward, (tokens, places, *adapters))
            if self._logits is not None:
                last = hidden.to(self._device.torch_device)[:1]
                self._logits(last if signature.kind == "prefill" else hidden)
        except Exception as error:  # compilers raise anything
            reason = getattr(error, "message", None) or f"{type(error).__name__}: {_first_line(error)}"
            raise ConfigurationRefused(f"the graph for {signature} does not compile ({reason})") from error
        self.build_times[signature] = BuildTimes(0.0, time.perf_counter() - started, 0.0)
        return DeviceGraph(run)

    def finish_warm_up(self, *, made_all: bool) -> None:
        """Ends the warm-up of all graphs or none, and logs it. A graph built from now on is late."""
        self._serving = True
        self._is_late_an_error = made_all and self._options.strict
        built = [graph for graph in self._graphs.values() if graph is not None]
        if built:
            times = self.build_times.values()
            self._log.info(
                "graphs_built", graphs=len(built), level=self._options.level,
                capture_s=round(sum(each.capture for each in times), 2),
                compile_s=round(sum(each.compile for each in times), 2),
                first_run_s=round(sum(each.first_run for each in times), 2),
                structures=self._compiler.num_structures, compiled=self._compiler.num_misses,
                memory_mib=round(self.num_bytes / 2**20, 1),
                kernels=max(graph.num_kernels for graph in built),
                signatures={
                    str(signature): [round(each.capture, 2), round(each.compile, 2), round(each.first_run, 2)]
                    for signature, each in self.build_times.items()
                },
            )  # fmt: skip

    def _lower(self, signature: GraphSignature, recording: Recording) -> Graph:
        sizes = self._options.sizes
        if self._options.level < INDUCTOR_LEVEL or (
            signature.kind == "decode" and sizes is not None and signature.batch not in sizes
        ):
            return build_kernel_graph(recording, self._device)
        try:
            return InductorGraph(recording, self._device, self._compiler)
        except Exception as error:  # compilers raise anything
            raise ConfigurationRefused(
                f"the graph for {signature} does not compile ({type(error).__name__}: {_first_line(error)});"
                " use -O 1, which needs no compiler"
            ) from error

    def _check(self, graph: Graph, recording: Recording, trial: Inputs, *adapters: torch.Tensor) -> None:
        """Compares the graph with the model on other contents; raises `NotStatic` if they differ."""
        tokens, places, plans = trial
        expected = self._model.forward(tokens, places, plans, *adapters)
        got = graph.replay((tokens, places, *adapters), plans)
        if isinstance(graph, KernelGraph):
            same = torch.allclose(got, expected, rtol=0, atol=0, equal_nan=True)
        else:
            wide = expected.float()
            off = (got.float() - wide).norm(dim=-1)
            tolerance = max(_TOLERANCE.get(dtype, 0.0) for dtype in {expected.dtype, *recording.dtypes})
            same = bool((off <= tolerance * wide.norm(dim=-1)).all())
        if not same:
            raise NotStatic("a replay differs from the model's own forward, so the step depends on its data")


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
