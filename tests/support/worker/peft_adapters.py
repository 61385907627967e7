"""Random LoRA adapters as PEFT saves them, and PEFT as the reference for a model with several of them."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.support.reference import Reference

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class AdapterSpec:
    """How an adapter is made."""

    seed: int
    """Seeds its weights."""
    rank: int = 8
    """PEFT's `r`."""
    targets: Sequence[str] = ALL_LINEAR
    """PEFT's `target_modules`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of PEFT's configuration."""


def write_adapter(base: Path, folder: Path, spec: AdapterSpec) -> Path:
    """Saves a random adapter for a model that changes what it says; returns its folder."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(
        r=spec.rank, lora_alpha=2 * spec.rank, target_modules=list(spec.targets), task_type="CAUSAL_LM",
        **spec.options,
    )  # fmt: skip
    adapted = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(spec.seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                # PEFT starts B with zeros, which change nothing.
                scale = 0.5 * parameter.shape[1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    adapted.save_pretrained(str(folder))
    return folder


class PeftReference(Reference):
    """One model with several adapters, run by PEFT in float32."""

    def __init__(self, folder: Path, adapters: Mapping[str, Path]) -> None:
        from peft import PeftModel

        super().__init__(folder, torch.float32)
        (first, source), *others = adapters.items()
        model = PeftModel.from_pretrained(self._model, source, adapter_name=first)
        for name, source in others:
            model.load_adapter(source, adapter_name=name)
        self._model = model.eval()

    @contextlib.contextmanager
    def using(self, adapter: str | None) -> Iterator[Reference]:
        """Makes this a reference for one adapter; `None` is the base model."""
        if adapter is None:
            with self._model.disable_adapter():
                yield self
            return
        self._model.set_adapter(adapter)
        yield self

    def mismatch(self, adapter: str | None, prompt: Sequence[int], continuation: Sequence[int]) -> str:
        """Returns where greedy generation differs from `continuation`; `None` is the base model."""
        with self.using(adapter):
            return self.greedy_mismatch(prompt, continuation)
