"""Quantizes weights by their effect on the model's output, on calibration data.

The weight of an error is its effect on the distribution of the next token. To second order, the Fisher
information gives it: for a row of a matrix, the mean over tokens of g * g * x * x^T. Here x is the layer's
input, and g the gradient, at that row's output, of the log-probability of a token drawn from the model. As in
GuidedQuant (Kim et al., 2025, arXiv:2505.07004), rows share the mean of g * g, and a matrix its Hessian.
Without gradients, the huge activations at the first token of a text would make up most of a Hessian, although
errors there change little. The text is a file, or written by the model itself.

A matrix is quantized by GPTQ (Frantar et al., 2022, arXiv:2210.17323), so that errors cancel. Inputs are
rounded in turn, and later inputs make up for the error of each. Scales are chosen first, from the original
weights, so rounding can begin with the most important inputs without reordering groups. Afterwards all
scales of a row are fitted to its codes together, and each code moves once more if the cost falls.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from protos.errors import ConfigurationRefused
from worker_svc.quantized.codes import SHARES, ScaleSearch, Scheme

# Added to the Hessian's diagonal, as a share of its mean. A few thousand tokens give a rough Hessian, and
# with 0.03 GPTQ overfits it. 0.1 does as well as 0.3.
_DAMPING: Final = 0.3
# Least-squares fits of a scale to its codes, each followed by rounding.
_FITS: Final = 2
_TINY: Final = 1e-12
# Inputs per product that spreads errors to later inputs.
_BLOCK: Final = 64
# Outputs per search for scales.
_ROWS: Final = 2048
# Pairs of groups per fit of scales, over all its outputs: 256 MiB in float64.
_PAIRS: Final = 2**25


def quantize_with(
    weight: torch.Tensor, hessian: torch.Tensor, scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Quantizes a matrix, in about 20 bytes for each pair of inputs and 30 bytes for each weight.

    A scale may be negative: codes reach a step further below 0 than above, and the sign turns that side to
    the group's largest weights.

    Args:
        weight: [outputs, inputs]; groups divide the inputs.
        hessian: cost of a pair of errors in the same row, in any unit; float32 [inputs, inputs], symmetric.
        scheme: of the result.

    Returns:
        Codes, uint8 [outputs, inputs], and scales, in the weight's type [outputs, groups]; or `None` if the
        Hessian is zero or not finite.
    """
    mean = hessian.diagonal().double().mean()
    if not bool(hessian.isfinite().all()) or mean <= 0:
        return None
    hessian = hessian / mean.float()
    hessian.diagonal().add_(_DAMPING)
    inputs, groups = weight.shape[1], scheme.groups(weight.shape[1])
    importance = hessian.diagonal().view(groups, -1)
    scales = torch.cat([_scales(rows, importance, scheme) for rows in weight.split(_ROWS)])
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    half = 2 ** (scheme.bits - 1)
    exact = weight.float().t().contiguous()
    codes = torch.empty_like(exact)
    codes[order] = _rounded(
        exact[order], _spread(scales, inputs)[order], _inverse_factor(hessian, order), half
    )
    rows = max(1, _PAIRS // groups**2)
    parts = zip(exact.split(rows, dim=1), codes.split(rows, dim=1), scales.split(rows), strict=True)
    scales = torch.cat([_fitted(*part, hessian) for part in parts])
    codes = _settled(exact, codes, _spread(scales, inputs), hessian, half)
    return (codes.t() + half).to(torch.uint8).contiguous(), scales


def _inverse_factor(hessian: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Returns the upper Cholesky factor of the inverse, float32 [inputs, inputs], of inputs in this order.

    Row i is the change of inputs from i on per unit of input i's error, with earlier inputs settled.
    """
    # Each step's float64 matrix, the largest of calibration, replaces the last.
    matrix: torch.Tensor = hessian[order[:, None], order].double()
    matrix = torch.linalg.cholesky(matrix)
    matrix = torch.cholesky_inverse(matrix)
    matrix = torch.linalg.cholesky(matrix, upper=True)
    return matrix.float()


def _scales(weight: torch.Tensor, importance: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Returns the scales with the least error, weighted by importance, [outputs, groups]; none is zero."""
    search = ScaleSearch(weight, scheme, importance)
    for share in SHARES:
        search.attempt(search.widest * share)
        search.attempt(search.widest * -share)
    for _ in range(_FITS):
        weighted = search.codes * importance
        fitted = (weighted * search.grouped).sum(dim=-1, keepdim=True)
        search.attempt(fitted / (weighted * search.codes).sum(dim=-1, keepdim=True).clamp_(min=_TINY))
    return search.scales.squeeze(-1).to(weight.dtype)


def _rounded(weight: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor, half: int) -> torch.Tensor:
    """Returns codes around 0, float32 [inputs, outputs], in the order of rounding; overwrites `weight`."""
    codes = torch.empty_like(weight)
    for first in range(0, len(weight), _BLOCK):
        last = min(first + _BLOCK, len(weight))
        block, errors = weight[first:last], torch.empty_like(weight[first:last])
        ahead = factor[first:last, first:last]
        for i in range(last - first):
            scale = scales[first + i]
            code = torch.round(block[i] / scale).clamp_(-half, half - 1)
            codes[first + i] = code
            errors[i] = (block[i] - code * scale) / ahead[i, i]
            block[i + 1 :].addr_(ahead[i, i + 1 :], errors[i], alpha=-1)
        weight[last:].addmm_(factor[first:last, last:].t(), errors, alpha=-1)
    return codes


def _spread(scales: torch.Tensor, inputs: int) -> torch.Tensor:
    """Returns the scale of each weight, float32 [inputs, outputs], from scales [outputs, groups]."""
    return scales.float().t().repeat_interleave(inputs // scales.shape[1], dim=0)


def _fitted(
    weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, hessian: torch.Tensor
) -> torch.Tensor:
    """Returns scales with the least cost for these codes; none is zero.

    `scales` stay in rows in which rounding the new scales to their type would cost more. Weights and codes
    are float32 [inputs, outputs].
    """
    inputs, outputs = weight.shape
    groups = scales.shape[1]
    grouped = codes.view(groups, -1, outputs)
    products = torch.empty(outputs, groups, groups)
    for group, members in enumerate(hessian.split(inputs // groups, dim=1)):
        reached = (members @ grouped[group]).view(groups, -1, outputs)
        products[:, :, group] = (reached * grouped).sum(dim=1).t()
    wanted = ((hessian @ weight).view(groups, -1, outputs) * grouped).sum(dim=1).t()
    diagonal = products.diagonal(dim1=1, dim2=2)
    diagonal.add_(1e-6 * diagonal.mean(dim=1, keepdim=True) + _TINY)  # groups with codes of 0 alone
    found = torch.linalg.solve(products.double(), wanted.double().unsqueeze(-1)).squeeze(-1).to(scales.dtype)
    found = torch.where(found.isfinite() & (found != 0), found, scales)

    def cost(tried: torch.Tensor) -> torch.Tensor:
        error = codes * _spread(tried, inputs) - weight
        return ((hessian @ error) * error).sum(dim=0)

    return torch.where((cost(found) < cost(scales))[:, None], found, scales)


def _settled(
    weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, hessian: torch.Tensor, half: int
) -> torch.Tensor:
    """Returns codes after another pass, in which each input gets the code that fits all others best.

    All but the Hessian are float32 [inputs, outputs].
    """
    settled, slopes = codes.clone(), hessian @ (codes * scales - weight)
    for first in range(0, len(weight), _BLOCK):
        last = min(first + _BLOCK, len(weight))
        moved = torch.empty_like(weight[first:last])
        for i in range(first, last):
            best = torch.round(settled[i] - slopes[i] / (hessian[i, i] * scales[i])).clamp_(-half, half - 1)
            moved[i - first] = (best - settled[i]) * scales[i]
            settled[i] = best
            slopes[first:last].addr_(hessian[first:last, i], moved[i - first])
        slopes[last:].addmm_(hessian[last:, first:last], moved)
    return settled


TOKENS: Final = 16384
"""Tokens of text by default."""
LENGTH: Final = 256
"""Tokens of a row of text, or of the model's context if that is shorter."""
Progress = Callable[[int, int, str], None]
"""Called with the number of steps done, the total, and the next step."""
Calibrated = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""By a module's name, the codes and scales of `quantize_with`."""
_LAYER: Final = re.compile(r"(?:.+\.)?layers\.\d+(?=\.)")
# Bytes of Hessians per pass over the text, or those of one layer if they are larger.
_HESSIAN_BYTES: Final = 2 * 2**30
# Rows of text at a time; activations of all layers stay until the gradients are known.
_BATCH: Final = 4
# Rows of its own text that the model writes at a time.
_WRITTEN: Final = 64


def calibrate(
    source: Path,
    modules: Mapping[str, int],
    scheme: Scheme,
    text: Path | None,
    tokens: int,
    progress: Progress,
) -> Calibrated:
    """Quantizes projections of decoder layers by their effect on the model's output.

    The model runs on CPUs in its own type (float16 as float32). Memory holds the model; all codes, a byte
    each; the activations of four rows of text; 2 GiB of Hessians or those of a layer; and the work of
    `quantize_with` on a matrix.

    `modules` are projections with the number of their inputs. The result lacks those that are no linear
    layers in transformers or that no gradient reached.
    """
    model, dtype = _load(source)
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and modules.get(name) == module.in_features
    }
    if not found:
        raise ConfigurationRefused(
            f"transformers has no linear layer of {source} under the names in its checkpoint; omit --calibrate"
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
            # The fastest on CPUs for short rows.
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
    """Yields modules in parts of whole layers with room for their Hessians."""
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
    """Returns the gradient by the logits of minus the log-probabilities of tokens drawn from them."""
    probabilities = logits.float().softmax(dim=-1)
    tokens = _drawn(probabilities, generator)
    gradient = probabilities.scatter_add_(-1, tokens, torch.full(tokens.shape, -1.0))
    return gradient.to(logits.dtype)


def _observer(hessian: torch.Tensor) -> Any:
    """Returns a hook for a linear layer that adds each pass to its Hessian."""

    def forward(_: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        x = inputs[0].detach()
        # Parameters are frozen, so the first observed layers begin the graph.
        output = output if output.requires_grad else output.detach().requires_grad_()
        output.register_hook(lambda gradient: _add(hessian, x, gradient))
        return output

    return forward


def _add(hessian: torch.Tensor, x: torch.Tensor, gradient: torch.Tensor) -> None:
    weights = gradient.flatten(0, -2).float().square().mean(dim=1, keepdim=True).sqrt_()
    weighted = x.flatten(0, -2).float() * weights
    hessian.addmm_(weighted.t(), weighted)


def own_text(model: Any, tokens: int, length: int, progress: Progress) -> torch.Tensor:
    """Returns text written by the model, token ids [rows, length]. It depends on the model alone.

    Each row begins with the beginning-of-sequence token, if any, and a token drawn from the whole
    vocabulary. The model continues it at temperature 1 and never ends it early.
    """
    generator = torch.Generator().manual_seed(0)
    config = model.config.get_text_config()
    rows = max(1, tokens // length)
    starts = torch.randint(config.vocab_size, (rows, 1), generator=generator)
    if isinstance(config.bos_token_id, int):
        starts = torch.cat([torch.full_like(starts, config.bos_token_id), starts], dim=1)
    parts = starts.split(_WRITTEN)
    written = []
    for done, part in enumerate(parts):
        progress(done, len(parts), "writing the calibration text")
        written.append(_continued(model, part, length, _ends(model), generator))
    return torch.cat(written)


def _ends(model: Any) -> list[int]:
    found: set[int] = set()
    for config in (model.config.get_text_config(), model.generation_config):
        ends = config.eos_token_id
        found |= set(ends) if isinstance(ends, list) else {ends} - {None}
    return sorted(found)


def _continued(
    model: Any, starts: torch.Tensor, length: int, ends: list[int], generator: torch.Generator
) -> torch.Tensor:
    ids, cache = starts, None
    for position in range(length - 1):
        # Never two tokens at once: torch would copy the head's weights for each row of a slice.
        output = model(
            ids[:, position : position + 1], past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        cache = output.past_key_values
        if position + 1 == ids.shape[1]:
            logits = output.logits[:, -1].float()
            logits[:, ends] = -torch.inf
            ids = torch.cat([ids, _drawn(logits.softmax(dim=-1), generator)], dim=1)
    return ids


def _drawn(probabilities: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Returns a token id for each distribution, [..., 1], from distributions [..., vocabulary].

    Takes a random number for each distribution; torch.multinomial takes a number for each token.
    """
    sums = probabilities.cumsum(dim=-1)
    points = torch.rand(*sums.shape[:-1], 1, generator=generator) * sums[..., -1:]
    return torch.searchsorted(sums, points, right=True).clamp_(max=sums.shape[-1] - 1)


def text_of(file: Path, source: Path, tokens: int, length: int) -> torch.Tensor:
    """Returns rows of a text file, token ids [rows, length], spread over the whole file.

    A file that is shorter than `tokens` gives fewer rows.
    """
    from transformers import AutoTokenizer

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationRefused(f"cannot read the calibration text {file}: {error}") from error
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigurationRefused(
            f"cannot read the tokenizer of {source}: {reason}; use --calibrate without a file"
        ) from error
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    begins = ids[:1] if ids and ids[0] == tokenizer.bos_token_id else []
    ids = ids[len(begins) :]
    own = length - len(begins)
    found = len(ids) // own
    if not found:
        raise ConfigurationRefused(
            f"the calibration text {file} has {len(ids)} tokens, and calibration needs at least {own}; choose a"
            " longer one"
        )
    rows = min(found, max(1, tokens // length))
    firsts = [row * found // rows * own for row in range(rows)]
    return torch.tensor([[*begins, *ids[first : first + own]] for first in firsts])
