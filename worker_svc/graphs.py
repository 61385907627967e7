"""The graphs that a worker runs: one a signature, all of them made before it serves."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from protos.errors import ConfigurationRefused, Internal
from protos.logs import get_logger
from worker_svc.capture import Graph, NotStatic
from worker_svc.settings import Backend


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

    def record(self, token_ids: torch.Tensor, positions: torch.Tensor) -> Graph:
        """Records :meth:`forward` on tensors of these shapes; raises ``NotStatic``."""
        ...


class Graphs:
    """Runs a model's steps as graphs, or as the model's own Python code where that is asked for.

    Attributes:
        num_late: graphs that were made while serving. Each of them made a request wait.
    """

    def __init__(self, model: RecordableModel, *, backend: Backend, strict: bool) -> None:
        """Starts without graphs.

        Args:
            model: whose caches are bound before the first graph is made.
            backend: "eager" makes none; "auto" does without where a step is not static.
            strict: whether to make a graph while serving is an error, and a step without one too.
        """
        self._model = model
        self._backend = backend
        self._strict = strict
        self._graphs: dict[Signature, Graph | None] = {}
        self._seconds: dict[Signature, float] = {}
        self._warm = False
        self._log = get_logger()
        self.num_late = 0

    def run(
        self, signature: Signature, tokens: torch.Tensor, positions: torch.Tensor, plans: Mapping[str, Any]
    ) -> torch.Tensor:
        """Hidden states [tokens, hidden], valid until the next step of the same signature.

        Raises:
            Internal: in strict mode, if there is no graph for the signature.
        """
        if self._backend == "eager":
            return self._model.forward(tokens, positions, plans)
        if signature not in self._graphs:
            self._late(signature)
            self.make(signature, tokens, positions, plans)
        graph = self._graphs[signature]
        if graph is None:
            return self._model.forward(tokens, positions, plans)
        return graph.replay((tokens, positions), plans)

    def make(
        self, signature: Signature, tokens: torch.Tensor, positions: torch.Tensor, plans: Mapping[str, Any]
    ) -> None:
        """Makes the graph of a signature, if it is missing, and holds it against the model's own forward.

        Args:
            signature: of the graph.
            tokens: of its shape; what they are does not matter.
            positions: like ``tokens``.
            plans: of a step of this shape. While the model is tried, it writes where they say.

        Raises:
            ConfigurationRefused: if the step is not static, and that was not left to us.
        """
        if self._backend == "eager" or signature in self._graphs:
            return
        started = time.perf_counter()
        try:
            graph: Graph | None = self._checked(
                self._model.record(tokens, positions), tokens, positions, plans
            )
        except NotStatic as error:
            message = f"no graph for {signature}: {error}"
            if self._backend == "compiled" or self._strict:
                raise ConfigurationRefused(f"{message}; use --backend eager") from error
            self._log.warning("graph_missing", signature=str(signature), reason=str(error))
            graph = None
        self._graphs[signature] = graph
        self._seconds[signature] = time.perf_counter() - started

    def finish(self) -> None:
        """From now on a graph that is missing is a defect."""
        self._warm = True
        if self._graphs:
            made = [graph for graph in self._graphs.values() if graph is not None]
            self._log.info(
                "graphs_made", graphs=len(made), total_s=round(sum(self._seconds.values()), 2),
                memory_mib=round(self.num_bytes / 2**20, 1),
                kernels=max((graph.num_kernels for graph in made), default=0),
                seconds={str(signature): round(took, 2) for signature, took in self._seconds.items()},
            )  # fmt: skip

    @property
    def num_bytes(self) -> int:
        """Memory that all graphs have for themselves."""
        return sum(graph.num_bytes for graph in self._graphs.values() if graph is not None)

    def _late(self, signature: Signature) -> None:
        self.num_late += 1
        if not self._warm:
            return
        if self._strict:
            raise Internal(f"no graph was made for {signature} before serving, and --compile-strict is set")
        self._log.warning("graph_made_late", signature=str(signature), late=self.num_late)

    def _checked(
        self, graph: Graph, tokens: torch.Tensor, positions: torch.Tensor, plans: Mapping[str, Any]
    ) -> Graph:
        """The graph, if it says what the model says of other tokens than those it was recorded with.

        All rows get the same token: they may share a place in the cache, and which of them is there last is left to chance.

        Raises:
            NotStatic: if it does not.
        """
        others, places = torch.full_like(tokens, 7), positions + 1
        expected = self._model.forward(others, places, plans)
        got = graph.replay((others, places), plans)
        if not torch.allclose(got, expected, rtol=0, atol=0, equal_nan=True):
            raise NotStatic(
                "a replay differs from the model's own forward, so what it does depends on its data"
            )
        return graph
