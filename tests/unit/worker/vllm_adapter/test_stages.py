"""Models that a pipeline cannot split are refused in one line that names what is in the way."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from protos.errors import ConfigurationRefused
from worker_svc.vllm_adapter.building import describe, names_of_states

HIDDEN = 16


class Config(SimpleNamespace):
    """The part of vLLM's configuration of a model that is read here."""

    architecture = "AnyForCausalLM"
    dtype = torch.float32

    def get_hidden_size(self) -> int:
        return HIDDEN


class Stage:
    """A model that passes on tensors of these shapes, without their first dimension."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        self._shapes = shapes

    def make_empty_intermediate_tensors(self, tokens: int, dtype: torch.dtype, device: torch.device) -> Any:
        tensors = {
            name: torch.zeros((tokens, *shape), dtype=dtype, device=device)
            for name, shape in self._shapes.items()
        }
        return SimpleNamespace(tensors=tensors)


def layer(shares_with: str | None = None) -> Any:
    return SimpleNamespace(
        num_heads=2, num_kv_heads=1, head_size=8, sliding_window=None, kv_cache_torch_dtype=torch.float32,
        kv_sharing_target_layer_name=shares_with, impl=SimpleNamespace(params=SimpleNamespace(latent=0, slopes=())),
    )  # fmt: skip


def test_states_travel_in_the_order_of_their_names() -> None:
    stage = Stage(residual=(HIDDEN,), hidden_states=(HIDDEN,))
    assert names_of_states(stage, Config()) == ("hidden_states", "residual")


@pytest.mark.parametrize("shape", [(4, 3), (HIDDEN // 2,), ()])
def test_states_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    stage = Stage(hidden_states=(HIDDEN,), per_layer_inputs=shape)
    text = ", ".join(map(str, ("tokens", *shape)))
    with pytest.raises(ConfigurationRefused) as caught:
        names_of_states(stage, Config())
    assert caught.value.message == (
        f"AnyForCausalLM passes per_layer_inputs [{text}] from stage to stage, but only [tokens, 16] is served;"
        " use --tensor-parallel-size instead of --pipeline-parallel-size"
    )


@pytest.mark.parametrize("here", ["first", "second"])
def test_a_cache_shared_across_stages_is_refused(here: str) -> None:
    layers = {"first": layer(), "second": layer(shares_with="first")}
    config = SimpleNamespace(model_config=Config())
    with pytest.raises(ConfigurationRefused, match=r"across stages \(second uses first's\); use --tensor"):
        describe(config, layers, None, here={here: layers[here]})
