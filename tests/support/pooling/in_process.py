"""Pools prompts in this process: a model in float32 on a CPU, as one graph for a shape of rows."""

from collections.abc import Sequence
from pathlib import Path

import torch

from protos.steps import Admission, Pool, PoolShape, StepPlan
from tests.support.sampling_params import pooling_params, sampling_params
from worker_svc.devices import open_device
from worker_svc.pooling import PoolRunner
from worker_svc.shapes import PoolingTask, PoolShapeConfig
from worker_svc.vllm_adapter import startup
from worker_svc.vllm_adapter.model import VllmModel


def load_model(folder: Path, task: PoolingTask | None = None) -> VllmModel:
    """Returns the model of a folder with its weights."""
    startup.prepare("cpu")
    torch.set_num_threads(1)
    model = VllmModel(folder, open_device("cpu"), dtype="float32", seed=0, pooling_task=task)
    model.load_weights()
    return model


def make_runner(model: VllmModel, shape: PoolShape) -> PoolRunner:
    """Returns a runner with the graph of one shape."""
    assert model.description.pooling is not None
    runner = PoolRunner(model, open_device("cpu"), model.description.pooling, PoolShapeConfig((shape,)))
    runner.make_graphs(lambda *_: None)
    assert all(runner.graphs.has(signature) for signature in runner.signatures())
    return runner


def pool(
    runner: PoolRunner,
    shape: PoolShape,
    prompts: Sequence[list[int]],
    *,
    second: Sequence[int] | None = None,
    use_activation: bool | None = None,
    dimensions: int = 0,
) -> list[torch.Tensor]:
    """Returns each prompt's values, [values] or [tokens, values].

    `second` says where each prompt's second text begins; 0 if it has none.
    """
    runner.reset()
    admit = [
        Admission(
            slot, prompt, 0, sampling_params(), {},
            pooling=pooling_params(use_activation, second_text_at=second[slot] if second else 0, dimensions=dimensions),
        )
        for slot, prompt in enumerate(prompts)
    ]  # fmt: skip
    outputs = runner.execute(StepPlan(1, admit=admit, work=Pool(range(len(prompts)), shape)))
    assert [output.error for output in outputs] == [None] * len(prompts)
    values = [torch.tensor(output.pooled) for output in outputs]
    if runner._description.of_tokens:
        return [each.view(len(prompt), -1) for each, prompt in zip(values, prompts, strict=True)]
    return values
