"""The projection of ColBERT models, which vLLM adds while it loads their weights.

If `config.json` names the size of the projection, vLLM makes it earlier and then fails: on BERT the module is
not initialized yet, on others it misses the weights. So vLLM never learns the size here; we read it.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from protos.errors import ConfigurationRefused


@functools.cache
def project_late() -> None:
    """Makes vLLM add the projections of ColBERT models while it loads weights."""
    from vllm.model_executor.models.colbert import ColBERTMixin

    ColBERTMixin.get_colbert_dim_from_config = lambda *_: None


@dataclass(frozen=True)
class LateProjection:
    """Applies the projection that a pooler's head has after its weights are loaded."""

    head: Any
    """vLLM's."""
    size: int
    """Values of a projected vector."""

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Returns projected states.

        Raises:
            ConfigurationRefused: if the weights have no projection, or one of another size.
        """
        found = 0 if self.head.projector is None else self.head.projector.out_features
        if found != self.size:
            raise ConfigurationRefused(
                f"the weights project tokens to {found} values, but config.json names {self.size}; correct its 'dim'"
            )
        projected: torch.Tensor = self.head.projector(states)
        return projected


def late_projection(model: Any, head: Any, hf_config: Any, name: str) -> LateProjection | None:
    """Returns the projection that a model will have, or `None` if it has all of its layers now.

    Raises:
        ConfigurationRefused: if the folder does not say how long the projected vectors are.
    """
    if getattr(model, "colbert_linear", head) is not None or head.projector is not None:
        return None
    for key in ("colbert_dim", "dim", "projection_dim"):
        if size := getattr(hf_config, key, None):
            return LateProjection(head, int(size))
    raise ConfigurationRefused(
        f"{name} does not say how long its vectors are; set 'dim' in config.json to the rows of its linear.weight"
    )
