"""Compiled graphs called with fixed tensors, without Dynamo's guards and bytecode.

Every tensor of a static graph stays where it is between steps: weights, caches, and the buffers of inputs.
After its first call through Dynamo, a graph is therefore called with the tensors of that call.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from protos.errors import ConfigurationRefused

Compiled = Callable[..., Sequence[torch.Tensor]]
"""A graph from a compiler. It takes all of the graph's inputs, weights included."""
Backend = Callable[..., Compiled]
"""A compiler as `torch.compile` calls it."""
_Call = tuple[Compiled, Sequence[Any], Sequence[torch.Tensor]]


class BoundGraph:
    """A compiled graph with the tensors of its first call."""

    def __init__(
        self, compiled: Compiled, arguments: Sequence[Any], output: int, buffers: Sequence[torch.Tensor]
    ) -> None:
        """Takes over the arguments of a call.

        Args:
            compiled: the graph.
            arguments: all of its inputs.
            output: the index of the result among the graph's outputs.
            buffers: those of the inputs that differ between calls. A graph may ignore some.
        """
        self._compiled = compiled
        self._arguments = list(arguments)
        self._output = output
        # Index among the arguments, index among the tensors of a call, buffer.
        self._varying = [
            (place, index, buffer)
            for index, buffer in enumerate(buffers)
            for place, argument in enumerate(arguments)
            if argument is buffer
        ]

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Runs the graph. Copies tensors of the host into its buffers, reads an NPU's in place."""
        arguments = self._arguments
        for place, index, buffer in self._varying:
            given = inputs[index]
            arguments[place] = buffer.copy_(given) if given.is_cpu else given
        return self._compiled(*arguments)[self._output]


class CallRecorder:
    """Notes the calls that Dynamo makes of compiled graphs, while one is bound."""

    def __init__(self) -> None:
        """Starts without a call."""
        self._calls: list[_Call] | None = None

    def watch(self, backend: Backend) -> Backend:
        """Returns a backend with graphs that can be bound.

        `torch_rbln` replaces `torch.compile`: if a backend is named `rbln_backend`, as the vendor's is, any
        error makes it run the function on the host. This backend has another name.
        """

        def noting_backend(module: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Compiled:
            compiled = backend(module, inputs, **options)

            def run(*arguments: Any) -> Sequence[torch.Tensor]:
                results = compiled(*arguments)
                if self._calls is not None:
                    self._calls.append((compiled, arguments, results))
                return results

            return run

        return noting_backend

    def bind(
        self, function: Callable[..., torch.Tensor], buffers: Sequence[torch.Tensor]
    ) -> tuple[BoundGraph, torch.Tensor]:
        """Calls a function that runs a single compiled graph and returns one of its outputs.

        Returns:
            The graph with the tensors of the call, and the function's result.

        Raises:
            ConfigurationRefused: if the function does other work.
        """
        calls: list[_Call] = []
        self._calls = calls
        try:
            result = function(*buffers)
        finally:
            self._calls = None
        found = [
            (compiled, arguments, index)
            for compiled, arguments, results in calls
            for index, each in enumerate(results)
            if each is result
        ]
        if len(calls) != 1 or not found:
            raise ConfigurationRefused(
                f"device rbln: a step must be one graph with the result among its outputs; this one ran"
                f" {len(calls)} graphs; choose another model"
            )
        compiled, arguments, output = found[0]
        return BoundGraph(compiled, arguments, output, buffers), result
