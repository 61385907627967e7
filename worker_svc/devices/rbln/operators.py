"""The operators that rebel-compiler lowers to NPU kernels: arguments, checks of shapes, references in torch.

Each argument of the attention operators has a role, which is the same in every operator (`q`, `scale`, …),
and a name, which differs between the namespaces. The order of scale and position also differs, and releases
add arguments, so only `emit` passes arguments by position, as `call_form` has read them. The sources are the
wheels vllm-rbln 0.12.0 and 0.11.2; `tests/contract/worker/test_rbln_oracle.py` compares with the first at
work, `test_rbln_wheels.py` with the text of both.

The references have no loops over rows, and their shapes never depend on the tensors' contents.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from protos.errors import ConfigurationRefused
from worker_svc.devices.base import EXPERT_ACTIVATIONS

Namespace = Literal["rbln_custom_ops", "rbln_triton_ops"]
CUSTOM: Final[Namespace] = "rbln_custom_ops"
"""The compiler's own kernels. Caches are [blocks, 2, kv_heads, 1, block, head_size]."""
TRITON: Final[Namespace] = "rbln_triton_ops"
"""Kernels written in Triton. Caches are [2, blocks, kv_heads, 1, block, head_size], integers int32."""

_TYPES: Final = {
    "window_size": "int",
    "is_causal": "bool",
    "attn_mask": "Tensor?",
    "sinks": "Tensor?",
    "k_quantize_scale": "Tensor?",
    "v_quantize_scale": "Tensor?",
    "cache_dtype": "ScalarType?",
}
_DEFAULTS: Final = {"is_causal": "True"}


@dataclass(frozen=True)
class Argument:
    """An argument of an operator."""

    role: str
    """The argument's meaning; the same in every operator."""
    name: str
    """Its name in the schema."""

    @property
    def kind(self) -> str:
        """Its type in torch's syntax."""
        return _TYPES.get(self.role, "Tensor")

    @property
    def schema(self) -> str:
        """The argument's part of the operator's schema."""
        default = _DEFAULTS.get(self.role, "None" if self.kind.endswith("?") else "")
        return f"{self.kind} {self.name}={default}" if default else f"{self.kind} {self.name}"


_STATES: Final = "q k v kv_cache"
# The arguments after the states: first those of both namespaces, then those of the custom operators only.
_FULL: Final = {
    "flash_causal_attention_naive": ("scale seq_idx block_tables dummy", "sinks k_quantize_scale v_quantize_scale cache_dtype"),
    "causal_attention_naive": ("seq_idx scale block_tables dummy", "sinks"),
}  # fmt: skip
_WINDOW: Final = "cache_seq_len cache_offset scale block_tables dummy"
_TRITON_NAMES: Final = {
    "q": "query",
    "k": "key",
    "v": "value",
    "scale": "qk_scale",
    "block_tables": "block_table",
}


def _arguments(namespace: Namespace, operator: str, roles: str) -> tuple[Argument, ...]:
    names = dict(_TRITON_NAMES) if namespace == TRITON else {}
    if namespace == TRITON and operator.startswith("flash"):
        names["dummy"] = "dummy0"
    return tuple(Argument(role, names.get(role, role)) for role in roles.split())


def _operators(namespace: Namespace) -> dict[str, tuple[Argument, ...]]:
    roles: dict[str, str] = {}
    for operator, (shared, custom) in _FULL.items():
        for phase in ("prefill", "decode"):
            extra = f" {custom}" if namespace == CUSTOM else ""
            roles[f"{operator}_{phase}"] = f"{_STATES} {shared}{extra}"
    for phase, custom in (("prefill", " sinks"), ("decode", " attn_mask sinks")):
        extra = custom if namespace == CUSTOM else ""
        roles[f"sliding_window_attention_naive_{phase}"] = f"{_STATES} {_WINDOW}{extra}"
    if namespace == CUSTOM:
        roles["sliding_window_attention_v1"] = (
            f"{_STATES} seq_idx scale block_tables window_size is_causal attn_mask sinks"
        )
    return {operator: _arguments(namespace, operator, names) for operator, names in roles.items()}


SIGNATURES: Final[dict[Namespace, dict[str, tuple[Argument, ...]]]] = {
    CUSTOM: _operators(CUSTOM),
    TRITON: _operators(TRITON),
}
"""By namespace and operator, the arguments in order."""
NAMESPACES: Final = tuple(SIGNATURES)


_SORTED: Final = "is_prompt_sorted"
# The roles of all names in schemas.
_ROLES: Final = {_SORTED: _SORTED} | {
    argument.name: argument.role
    for operators in SIGNATURES.values()
    for arguments in operators.values()
    for argument in arguments
}


def schema(namespace: Namespace, operator: str) -> str:
    """Returns the schema of the operator's reference in torch's syntax.

    Like the vendor's, Triton operators declare no write to the cache. The compiler's own do, and have a
    keyword since vllm-rbln 0.12.1.
    """
    arguments = ", ".join(argument.schema for argument in SIGNATURES[namespace][operator])
    if namespace == CUSTOM:
        arguments = arguments.replace("Tensor kv_cache", "Tensor(a!) kv_cache") + f", *, bool {_SORTED}=False"
    return f"{operator}({arguments}) -> Tensor"


@dataclass(frozen=True)
class CallForm:
    """How a registered operator takes its arguments."""

    namespace: Namespace
    operator: str
    positional: tuple[str, ...]
    """The roles of the leading arguments."""
    keywords: tuple[tuple[str, str], ...]
    """The names and roles of other arguments."""


def call_form(namespace: Namespace, operator: str) -> CallForm:
    """Reads an operator's schema: releases of the vendor's packages differ in theirs.

    Names identify roles. The runtime's names were never published, so an unknown name has the role of its
    place in the plugin's calls, unless another argument has it. Other unknown arguments keep their defaults.

    Raises:
        ConfigurationRefused: if the operator is not registered, requires an unknown argument or lacks a
            necessary one.
    """
    registered = getattr(getattr(torch.ops, namespace), operator, None)
    if registered is None:
        raise _unfit(namespace, operator, "does not exist")
    arguments = registered.default._schema.arguments  # noqa: SLF001 - there is no public name
    ours = SIGNATURES[namespace][operator]
    by_place = [argument.role for argument in ours]
    named = {_ROLES.get(argument.name) for argument in arguments}
    positional: list[str] = []
    keywords: list[tuple[str, str]] = []
    for place, argument in enumerate(arguments):
        role = _ROLES.get(argument.name)
        if role is None and place < len(by_place) and by_place[place] not in named:
            role = by_place[place]
        if role is None:
            if not argument.has_default_value():
                raise _unfit(namespace, operator, f"requires the unknown argument {argument.name}")
        elif argument.kwarg_only or role not in by_place or len(positional) < place:
            keywords.append((argument.name, role))
        else:
            positional.append(role)
    taken = {*positional, *(role for _, role in keywords)}
    for argument in ours:
        if argument.role not in taken and (argument.role == "sinks" or not argument.kind.endswith("?")):
            raise _unfit(namespace, operator, f"lacks the argument {argument.name}")
    return CallForm(namespace, operator, tuple(positional), tuple(keywords))


def _unfit(namespace: Namespace, operator: str, reason: str) -> ConfigurationRefused:
    return ConfigurationRefused(
        f"the vendor's operator {namespace}::{operator} {reason}; install the packages of release 0.12.0 or 0.12.1"
    )


_INDICES = ("seq_idx", "block_tables", "cache_seq_len", "cache_offset")


def check(namespace: Namespace, operator: str, by_role: Mapping[str, Any]) -> None:
    """Refuses arguments that no kernel takes. Checks shapes and types only, never the tensors' contents.

    Raises:
        ValueError: names the operator, the argument and its expected shape.
    """
    query: torch.Tensor = by_role["q"]

    def expect(role: str, what: str, holds: bool) -> None:
        if not holds:
            value = by_role[role]
            found = f"{list(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)
            raise ValueError(f"{namespace}::{operator}: {role} must be {what}, got {found}")

    expect("q", "[batch, kv_heads, groups, q_len, head_size]", query.dim() == 5)
    batch, kv_heads, groups, query_len, head_size = query.shape
    state = (batch, kv_heads, 1, query_len, head_size)
    for role in ("k", "v"):
        expect(role, f"{list(state)} {query.dtype}", by_role[role].shape == state)
    cache: torch.Tensor = by_role["kv_cache"]
    layout = "2, blocks" if namespace == TRITON else "blocks, 2"
    two = 0 if namespace == TRITON else 1
    expect(
        "kv_cache",
        f"[{layout}, {kv_heads}, 1, block, {head_size}]",
        cache.dim() == 6
        and cache.shape[two] == 2
        and cache.shape[2:4] == (kv_heads, 1)
        and cache.shape[5] == head_size,
    )
    expect("scale", "a scalar tensor", by_role["scale"].dim() == 0)
    prefill = operator.endswith("_prefill") or (not operator.endswith("_decode") and query_len > 1)
    if prefill:
        expect("q", "of batch 1", batch == 1)
    else:
        expect("q", "of one token a row", query_len == 1)
    _check_positions(namespace, operator, by_role, expect, prefill=prefill)
    if by_role.get("sinks") is not None:
        sinks: torch.Tensor = by_role["sinks"]
        expect(
            "sinks",
            f"[{kv_heads * groups}, sinks]",
            sinks.dim() == 2 and sinks.shape[0] == kv_heads * groups,
        )
    _check_has_reference(namespace, operator, by_role)


def _check_positions(
    namespace: Namespace,
    operator: str,
    by_role: Mapping[str, Any],
    expect: Callable[[str, str, bool], None],
    *,
    prefill: bool,
) -> None:
    """Checks the block tables and positions, which say where a step's tokens go."""
    batch = by_role["q"].shape[0]
    tables: torch.Tensor = by_role["block_tables"]
    in_place = "cache_seq_len" in by_role
    if prefill:
        expect("block_tables", "[1]" if in_place else "[partitions]", tables.dim() == 1)
    else:
        expect("block_tables", f"[{batch}, partitions]", tables.dim() == 2 and tables.shape[0] == batch)
    if in_place or operator.startswith("causal"):
        expect("block_tables", "of one partition", tables.shape[-1] == 1)
    for role in ("seq_idx", "cache_seq_len", "cache_offset"):
        if role in by_role:
            expect(role, f"[{batch}, 1]", by_role[role].shape == (batch, 1))
    for role in _INDICES:
        if role in by_role:
            integers = (torch.int32,) if namespace == TRITON else (torch.int32, torch.int64)
            expect(role, " or ".join(map(str, integers)), by_role[role].dtype in integers)


def _check_has_reference(namespace: Namespace, operator: str, by_role: Mapping[str, Any]) -> None:
    """Refuses options that the reference does not implement."""
    unsupported = {
        "an 8-bit KV cache": by_role.get("cache_dtype") is not None,
        "attention without causality": not by_role.get("is_causal", True),
        "masks": by_role.get("attn_mask") is not None,
    }
    for what, needed in unsupported.items():
        if needed:
            raise ValueError(f"{namespace}::{operator} has no reference for {what}")


SAMPLER_NAMESPACE: Final = "rbln"
ARGMAX: Final = "argmax"
TOP_K_TOP_P: Final = "top_k_top_p"
MAX_TOP_P: Final = 0.995
"""Largest `top_p` that the plugin of vllm-rbln 0.12.0 passes to the operator."""


def emit_argmax(logits: torch.Tensor) -> torch.Tensor:
    """Calls the operator on logits [rows, vocab]. Returns token ids [rows]."""
    operators: Any = torch.ops.rbln
    tokens: torch.Tensor = operators.argmax(logits)
    return tokens


def emit_top_k_top_p(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Draws a token of each row with the operator, as `rbln_top_k_top_p_sample` of vllm-rbln 0.12.0 does.

    Unlike the plugin, it keeps the logits: the host may read them for other rows.

    Args:
        logits: [rows, vocab].
        temperature: [rows], above 0.
        top_k: int32 [rows], from 1 to the vocabulary's size.
        top_p: float32 [rows], at most `MAX_TOP_P`.

    Returns:
        Token ids [rows], possibly beyond the vocabulary in rows whose logits are not finite.
    """
    operators: Any = torch.ops.rbln
    scaled = logits / temperature.to(logits.dtype).unsqueeze(dim=1)
    drawn: torch.Tensor = operators.top_k_top_p(torch.nn.functional.softmax(scaled, dim=-1), top_k, top_p)
    return drawn


def _draw_top_k_top_p(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Applies top-k, then top-p to the renormalized rest, as vLLM does; the vendor's order is unknown."""
    vocab = probs.shape[-1]
    finite = probs.isfinite().all(dim=-1)
    kept, tokens = probs.float().where(finite[:, None], 1).sort(dim=-1, descending=True)
    kept = kept.masked_fill(torch.arange(vocab) >= top_k[:, None], 0)
    kept = kept / kept.sum(dim=-1, keepdim=True)
    kept = kept.masked_fill(kept.cumsum(dim=-1) - kept >= top_p[:, None], 0)
    drawn = tokens.gather(1, torch.multinomial(kept, 1))[:, 0]
    # The plugin warns of token ids beyond the vocabulary where probabilities are NaN.
    return drawn.where(finite, vocab)


def register_samplers() -> None:
    """Registers references and fakes of the sampler's operators, unless the vendor has registered them."""
    for name, arguments, reference in (
        (ARGMAX, "Tensor logits", lambda logits: logits.argmax(dim=-1)),
        (TOP_K_TOP_P, "Tensor probs, Tensor top_k, Tensor top_p", _draw_top_k_top_p),
    ):
        if hasattr(torch.ops.rbln, name):
            continue
        library = torch.library.Library(SAMPLER_NAMESPACE, "FRAGMENT")
        tags = (torch.Tag.nondeterministic_seeded,) if name == TOP_K_TOP_P else ()
        library.define(f"{name}({arguments}) -> Tensor", tags=tags)
        library.impl(name, reference, "CPU")
        torch.library.register_fake(
            f"{SAMPLER_NAMESPACE}::{name}",
            lambda values, *_: values.new_empty(values.shape[:-1], dtype=torch.int64),
            lib=library,
            allow_override=False,
        )
        _LIBRARIES.append(library)


# Keeps the operators registered.
_LIBRARIES: list[torch.library.Library] = []


def register_all() -> None:
    """Registers the references of all operators that exist nowhere else."""
    for namespace, operators in SIGNATURES.items():
        register(namespace, operators)
    register_samplers()


def register(namespace: Namespace, operators: Iterable[str]) -> None:
    """Registers a reference and a fake for each operator that is not registered yet.

    The vendor's Triton operators have no kernel for a CPU and get only the reference. The operator for
    expert layers belongs to the compiler's own kernels.
    """
    library = torch.library.Library(namespace, "FRAGMENT")
    for operator in operators:
        name = f"{namespace}::{operator}"
        is_new = not hasattr(getattr(torch.ops, namespace), operator)
        if is_new:
            library.define(schema(namespace, operator))
        elif torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):  # noqa: SLF001 - no public question
            continue
        library.impl(operator, _reference(namespace, operator), "CPU")
        if is_new:
            torch.library.register_fake(name, _fake(namespace, operator), lib=library, allow_override=False)
    if namespace == CUSTOM:
        _register_experts(library)
    _LIBRARIES.append(library)


def emit(form: CallForm, by_role: Mapping[str, Any]) -> torch.Tensor:
    """Calls an operator; missing arguments become `None`.

    Returns [batch, kv_heads, groups, q_len, head_size].
    """
    arguments = [by_role.get(role) for role in form.positional]
    keywords = {name: by_role.get(role) for name, role in form.keywords}
    result: torch.Tensor = getattr(getattr(torch.ops, form.namespace), form.operator)(*arguments, **keywords)
    return result


def _by_role(namespace: Namespace, operator: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    # torch omits arguments that equal their defaults.
    return {
        argument.role: value
        for argument, value in zip(SIGNATURES[namespace][operator], arguments, strict=False)
    }


def _fake(namespace: Namespace, operator: str) -> Callable[..., torch.Tensor]:
    def fake(*arguments: Any, is_prompt_sorted: bool = False) -> torch.Tensor:
        del is_prompt_sorted
        by_role = _by_role(namespace, operator, arguments)
        check(namespace, operator, by_role)
        query: torch.Tensor = by_role["q"]
        return query.new_empty(query.shape)

    return fake


def _reference(namespace: Namespace, operator: str) -> Callable[..., torch.Tensor]:
    def run(*arguments: Any, is_prompt_sorted: bool = False) -> torch.Tensor:
        del is_prompt_sorted
        given = _by_role(namespace, operator, arguments)
        check(namespace, operator, given)
        cache: torch.Tensor = given["kv_cache"]
        if namespace == TRITON:
            cache = cache.transpose(0, 1)
        query, key, value, scale, tables = (given[role] for role in ("q", "k", "v", "scale", "block_tables"))
        sinks = given.get("sinks")
        if "cache_seq_len" in given:
            before, after = given["cache_seq_len"], given["cache_offset"]
            return sliding_reference(query, key, value, cache, before, after, scale, tables, sinks=sinks)
        return paged_reference(
            query, key, value, cache, scale, given["seq_idx"], tables,
            window=given.get("window_size", 0), sinks=sinks,
        )  # fmt: skip

    return run


def paged_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    scale: torch.Tensor,
    start: torch.Tensor,
    tables: torch.Tensor,
    *,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Appends keys and values from position `start` on, then attends over blocks.

    A chunk's padding is written like any token. Tokens beyond the table's end go to block 0, the block of its
    unused entries.

    Args:
        query: [rows, kv_heads, groups, q_len, head_size].
        key: [rows, kv_heads, 1, q_len, head_size].
        value: like `key`.
        cache: written in place.
        scale: scalar.
        start: integers [rows, 1], the position of each row's first token.
        tables: integers [rows, partitions], or [partitions] for a single row.
        window: the number of visible tokens of each token, itself included; 0 for all.
        sinks: [heads, sinks], scores of extra positions without a value.

    Returns:
        Like `query`.
    """
    rows, _, _, query_len, head_size = query.shape
    block_size = cache.shape[4]
    table = tables.view(rows, -1).long()
    partitions = table.shape[1]
    positions = start.long() + torch.arange(query_len, device=query.device)
    partition = positions // block_size
    blocks = table.gather(1, partition.clamp(max=partitions - 1)).masked_fill(partition >= partitions, 0)
    offsets = positions % block_size
    cache[blocks, 0, :, 0, offsets] = key[:, :, 0].transpose(1, 2).to(cache.dtype)
    cache[blocks, 1, :, 0, offsets] = value[:, :, 0].transpose(1, 2).to(cache.dtype)
    # Shape: rows, partitions, 2, kv_heads, block, head_size; then 2, rows, kv_heads, context, head_size.
    context = cache[table][:, :, :, :, 0].permute(2, 0, 3, 1, 4, 5)
    context = context.reshape(2, rows, -1, partitions * block_size, head_size)
    seen = torch.arange(context.shape[3], device=query.device)
    visible = seen <= positions[:, :, None]
    if window:
        visible = visible & (seen > positions[:, :, None] - window)
    return _attention(query, context[0], context[1], visible, scale, sinks)


def sliding_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    scale: torch.Tensor,
    tables: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Appends to each row's block, attends over a window, and keeps the last window in the block.

    Args:
        query: [rows, kv_heads, groups, q_len, head_size].
        key: [rows, kv_heads, 1, q_len, head_size].
        value: like `key`.
        cache: its blocks hold a window each; written in place. Unfilled places become zero.
        before: integers [rows, 1], tokens in the block before the step.
        after: integers [rows, 1], `before` plus the step's real tokens; a row without real tokens is
            padding and gets zeros.
        scale: scalar.
        tables: integers [rows, 1], or [1] for a single row.
        sinks: [heads, sinks].

    Returns:
        Like `query`.
    """
    rows, _, _, query_len, head_size = query.shape
    window = cache.shape[4]
    blocks = tables.view(rows).long()
    before, after = before.long(), after.long()
    device = query.device
    # Token 0 is the oldest one in the block. The buffer has the block's places, then the step's tokens.
    place = torch.arange(window + query_len, device=device)
    token = torch.where(place < window, place, before + place - window)
    own = before + torch.arange(query_len, device=device)
    filled = (place >= window) | (place < before)
    visible = (token[:, None] <= own[:, :, None]) & (token[:, None] > own[:, :, None] - window)
    visible = visible & filled[:, None]
    states = torch.stack((key, value), dim=1)[:, :, :, 0]
    # Shape: rows, 2, kv_heads, window + q_len, head_size.
    context = torch.cat((cache[blocks][:, :, :, 0], states.to(cache.dtype)), dim=3)
    kept = place[:window] + (after - window).clamp(min=0)
    source = torch.where(kept < before, kept, kept - before + window).clamp(max=window + query_len - 1)
    source = source[:, None, None, :, None].expand(-1, 2, cache.shape[2], -1, head_size)
    slid = context.gather(3, source).masked_fill((kept >= after)[:, None, None, :, None], 0)
    cache[blocks] = slid[:, :, :, None]
    attended = _attention(query, context[:, 0], context[:, 1], visible, scale, sinks)
    return attended.masked_fill((after <= before)[:, :, None, None, None], 0)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scale: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attends with grouped queries [rows, kv_heads, groups, q_len, head_size].

    Keys and values are [rows, kv_heads, context, head_size], `visible` is bool [rows, q_len, context]. A
    token that sees nothing gets zeros.
    """
    rows, kv_heads, groups, query_len, head_size = query.shape
    unseen = ~visible.any(dim=1)[:, None, :, None]
    key, value = key.float().masked_fill(unseen, 0), value.float().masked_fill(unseen, 0)
    # Heads that share keys are stacked: [rows, kv_heads, groups * q_len, …].
    flat = query.float().reshape(rows, kv_heads, groups * query_len, head_size)
    scores = (flat @ key.transpose(-1, -2) * scale.float()).view(rows, kv_heads, groups, query_len, -1)
    hidden = ~visible[:, None, None]
    scores = scores.masked_fill(hidden, -torch.inf)
    context = scores.shape[-1]
    if sinks is not None:
        columns = sinks.float().view(1, kv_heads, groups, 1, -1).expand(rows, -1, -1, query_len, -1)
        scores = torch.cat((scores, columns), dim=-1)
    weights = scores.softmax(dim=-1)[..., :context].masked_fill(hidden, 0)
    attended = weights.reshape(rows, kv_heads, groups * query_len, context) @ value
    return attended.view(query.shape).to(query.dtype)


EXPERTS: Final = "custom_moe_glu"
EXPERT_ARGUMENTS: Final = (
    "hidden_states",
    "gate_proj_weight",
    "up_proj_weight",
    "down_proj_weight",
    "masked_routing_weights",
    "layer.activation.value",
    "layer.expert_map",
    "None",
    "None",
    "None",
)
"""The arguments that the plugin passes, by its own names. The last three are for quantized experts."""

_EXPERTS_SCHEMA: Final = (
    f"{EXPERTS}(Tensor hidden_states, Tensor gate_proj_weight, Tensor up_proj_weight,"
    " Tensor down_proj_weight, Tensor masked_routing_weights, str activation, Tensor? expert_map,"
    " Tensor? gate_proj_scale, Tensor? up_proj_scale, Tensor? down_proj_scale) -> Tensor"
)


def emit_experts(
    hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, activation: str
) -> torch.Tensor:
    """Calls the vendor's operator for a whole layer, with arguments and result of `Device.run_experts`.

    vllm-rbln 0.11.2 and 0.12.0 call it for each of the older plugins' two forms, and document no result. The
    reference follows the arguments and the plugin's use of the result. A rank with a part of the experts
    passes a layer of these, so it needs no `expert_map`.
    """
    inner = down.shape[-1]
    operator: Any = torch.ops.rbln_custom_ops.custom_moe_glu
    mixed: torch.Tensor = operator(
        hidden, gate_up[:, :inner, :], gate_up[:, inner:, :], down, weights.t(), activation, None, None, None, None
    )  # fmt: skip
    return mixed


def _register_experts(library: torch.library.Library) -> None:
    """Registers the reference and a fake, unless the vendor has registered the operator."""
    if hasattr(torch.ops.rbln_custom_ops, EXPERTS):
        return
    library.define(_EXPERTS_SCHEMA)
    library.impl(EXPERTS, experts_reference, "CPU")
    torch.library.register_fake(
        f"rbln_custom_ops::{EXPERTS}", _fake_experts, lib=library, allow_override=False
    )


def experts_reference(
    hidden: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    activation: str,
    expert_map: torch.Tensor | None,
    *scales: torch.Tensor | None,
) -> torch.Tensor:
    """Sums the experts' gated MLPs by weight, in float32, expert after expert.

    Args:
        hidden: [tokens, hidden].
        gate: [local experts, inner, hidden].
        up: like `gate`.
        down: [local experts, hidden, inner].
        weights: [experts, tokens]; an expert's MLP counts only for tokens with a weight other than 0.
        activation: a key of `base.EXPERT_ACTIVATIONS`.
        expert_map: integers [experts], the index of each expert in `gate`, `up` and `down`, -1 for those of
            other ranks; `None` if `weights` covers exactly these experts.
        *scales: of quantized experts; must be `None`.

    Returns:
        Like `hidden`.

    Raises:
        ValueError: for unsupported shapes, activations or scales.
    """
    check_experts(hidden, gate, up, down, weights, activation, expert_map, *scales)
    rows = range(len(weights)) if expert_map is None else expert_map.tolist()
    wide = hidden.float()
    total = torch.zeros_like(wide)
    for expert, local in enumerate(rows):
        if local < 0:
            continue
        gated = EXPERT_ACTIVATIONS[activation](wide @ gate[local].float().t()) * (
            wide @ up[local].float().t()
        )
        shares = weights[expert].float().unsqueeze(-1)
        # An unused expert may overflow, and 0 times infinity is NaN.
        total += (gated @ down[local].float().t() * shares).masked_fill(shares == 0, 0)
    return total.to(hidden.dtype)


def check_experts(
    hidden: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    activation: str,
    expert_map: torch.Tensor | None,
    *scales: torch.Tensor | None,
) -> None:
    """Refuses arguments that the operator does not take. Checks shapes and types only.

    Raises:
        ValueError: names the argument and its expected shape.
    """
    experts, inner, size = gate.shape
    tokens = hidden.shape[0]
    routed = experts if expert_map is None else len(expert_map)
    expected = {
        "hidden_states": (hidden, (tokens, size)),
        "up_proj_weight": (up, (experts, inner, size)),
        "down_proj_weight": (down, (experts, size, inner)),
        "masked_routing_weights": (weights, (routed, tokens)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape or tensor.dtype != hidden.dtype:
            raise ValueError(
                f"{EXPERTS}: {name} must be {list(shape)} {hidden.dtype}, got {list(tensor.shape)} {tensor.dtype}"
            )
    if activation not in EXPERT_ACTIVATIONS:
        raise ValueError(f"{EXPERTS}: there is no activation {activation!r}")
    if any(scale is not None for scale in scales):
        raise ValueError(f"{EXPERTS} has no reference for quantized experts")


def _fake_experts(*arguments: Any) -> torch.Tensor:
    check_experts(*arguments)
    hidden: torch.Tensor = arguments[0]
    return torch.empty_like(hidden)
