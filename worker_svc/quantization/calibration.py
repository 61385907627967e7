"""Calibrates quantized weights: runs the model in floating point to learn which errors of a matrix matter.

What matters is how much the distribution of the next token changes. To second order, that change is given by
the Fisher information: for a row of a matrix, the mean over tokens of g * g * x * x^T. Here x is the layer's
input, and g the gradient, at that row's output, of the log-probability of a token drawn from the model. As in
GuidedQuant (Kim et al., 2025, arXiv:2505.07004), rows share one mean of g * g, so one matrix has one Hessian.

Gradients matter: models keep huge activations at the first token of a text. Without gradients these make up
most of a Hessian, although errors there change little.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from protos.errors import ConfigurationRefused
from worker_svc.quantization.calibration_text import LENGTH, Progress, drawn, own_text, text_of
from worker_svc.quantization.gptq import quantize_with
from worker_svc.quantization.scheme import Scheme

TOKENS: Final = 16384
"""Tokens of text by default."""
Calibrated = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""By a module's name, the codes and scales of `gptq.quantize_with`."""
_LAYER: Final = re.compile(r"(?:.+\.)?layers\.\d+(?=\.)")
# Hessians kept at a time; a layer's always are. The text is read once for each such part of the layers.
_HESSIAN_BYTES: Final = 2 * 2**30
# Rows of text per pass; activations of all layers are kept until the gradients are known.
_BATCH: Final = 4


def calibrate(
    source: Path,
    modules: Mapping[str, int],
    scheme: Scheme,
    text: Path | None,
    tokens: int,
    progress: Progress,
) -> Calibrated:
    """Quantizes projections of decoder layers with the model's own sense of what matters.

    The model runs on CPUs in its own type (float16 as float32). Memory holds the model and all codes, a byte
    each; the activations of four rows of text; 2 GiB of Hessians or those of one layer; and what `gptq` takes
    for one matrix.

    Args:
        source: a Hugging Face folder.
        modules: projections to quantize, with their inputs, which hold whole groups.
        scheme: of the projections.
        text: a file, or `None` for text that the model writes.
        tokens: of text.
        progress: see `calibration_text.Progress`.

    Returns:
        What was calibrated. A module is missing if transformers has no such linear layer, or no gradient
        reached it.

    Raises:
        ConfigurationRefused: if transformers does not run the model, or the text cannot be used, in one line.
    """
    model, dtype = _load(source)
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and modules.get(name) == module.in_features
    }
    if not found:
        raise ConfigurationRefused(
            f"transformers has no linear layer of {source} under the name that its checkpoint has; omit --calibrate"
        )
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or LENGTH
    with torch.no_grad():
        length = min(LENGTH, context)
        rows = text_of(text, source, tokens, length) if text else own_text(model, tokens, length, progress)
    calibrated: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for part in _parts(found):
        hessians = _hessians(model, part, rows, progress)
        for done, (name, hessian) in enumerate(hessians.items()):
            progress(done, len(hessians), name)
            if made := quantize_with(part[name].weight.detach().to(dtype), hessian, scheme):
                calibrated[name] = made
    return calibrated


def _load(source: Path) -> tuple[Any, torch.dtype]:
    """Returns the model of transformers, whose parameters are frozen, and the type that it is stored in."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        kinds = config.architectures or ["none"]
        if not kinds[0].endswith("ForCausalLM"):
            raise ConfigurationRefused(
                f"{source} has the architecture {kinds[0]}, and only text models (...ForCausalLM) are calibrated;"
                " omit --calibrate"
            )
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            dtype="auto",
            # On CPUs, plain attention is the fastest for such short rows.
            attn_implementation="eager",
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigurationRefused(
            f"transformers cannot run {source}, so it cannot be calibrated: {reason}; omit --calibrate"
        ) from error
    if missing := sorted(report["missing_keys"]):
        raise ConfigurationRefused(f"{source} has no {missing[0]}; fetch the model again")
    dtype = model.dtype
    if dtype == torch.float16:
        model = model.float()  # gradients would overflow
    return model.eval().requires_grad_(False), dtype


def _parts(modules: Mapping[str, torch.nn.Linear]) -> Iterator[dict[str, torch.nn.Linear]]:
    """Yields modules in parts of whole layers, whose Hessians fit."""
    layers: dict[str, dict[str, torch.nn.Linear]] = {}
    for name, module in modules.items():
        match = _LAYER.match(name)
        layers.setdefault(match[0] if match else name, {})[name] = module
    part: dict[str, torch.nn.Linear] = {}
    for layer in layers.values():
        if part and _hessian_bytes(part) + _hessian_bytes(layer) > _HESSIAN_BYTES:
            yield part
            part = {}
        part |= layer
    if part:
        yield part


def _hessian_bytes(modules: Mapping[str, torch.nn.Linear]) -> int:
    return sum(4 * module.in_features**2 for module in modules.values())


def _hessians(
    model: Any, modules: Mapping[str, torch.nn.Linear], rows: torch.Tensor, progress: Progress
) -> dict[str, torch.Tensor]:
    """Returns each module's Hessian, float32 [inputs, inputs].

    Args:
        model: frozen.
        modules: by name.
        rows: token ids [rows, length].
        progress: called for each batch.
    """
    hessians = {name: torch.zeros(each.in_features, each.in_features) for name, each in modules.items()}
    hooks = [each.register_forward_hook(_observer(hessians[name])) for name, each in modules.items()]
    generator = torch.Generator().manual_seed(0)
    batches = rows.split(_BATCH)
    try:
        for done, ids in enumerate(batches):
            progress(done, len(batches), "reading the calibration text")
            with torch.enable_grad():
                logits = model(ids, use_cache=False).logits
            if not logits.requires_grad:
                break  # no module took part
            logits.backward(_gradient(logits.detach(), generator))
    finally:
        for hook in hooks:
            hook.remove()
    return hessians


def _gradient(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Returns the gradient, for logits, of minus the log-probabilities of tokens drawn with them."""
    probabilities = logits.float().softmax(dim=-1)
    tokens = drawn(probabilities, generator)
    gradient = probabilities.scatter_add_(-1, tokens, torch.full(tokens.shape, -1.0))
    return gradient.to(logits.dtype)


def _observer(hessian: torch.Tensor) -> Any:
    """Returns a hook of a linear layer that adds what one pass shows to its Hessian."""

    def forward(_: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        x = inputs[0].detach()
        # Parameters are frozen, so the first layers that are observed begin the graph.
        output = output if output.requires_grad else output.detach().requires_grad_()
        output.register_hook(lambda gradient: _add(hessian, x, gradient))
        return output

    return forward


def _add(hessian: torch.Tensor, x: torch.Tensor, gradient: torch.Tensor) -> None:
    weights = gradient.flatten(0, -2).float().square().mean(dim=1, keepdim=True).sqrt_()
    weighted = x.flatten(0, -2).float() * weights
    hessian.addmm_(weighted.t(), weighted)
