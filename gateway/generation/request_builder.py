"""From request bodies to prompts and wire requests, with the checks possible without a scheduler."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from gateway.auth.key_store import NO_ACCOUNT, Account
from gateway.parsers.formats import Format
from gateway.parsers.reasoning import SWITCHES
from gateway.parsers.writing import Call, write
from gateway.scheduler_client.served_model import ServedModel
from gateway.schemas.base import check_counts, clip, quote
from gateway.schemas.chat import Message, TemplateInput
from gateway.schemas.sampling import SamplingRequest
from gateway.text.chat_template import ChatTemplate, joined
from gateway.text.derive import Derived
from gateway.text.tokenization import TextCodec, TextWorker
from protos.errors import ContextExceeded, InvalidArgument
from protos.limits import SAMPLING
from protos.service.logs import get_logger
from protos.triptych.v1 import common_pb2 as pb
from protos.triptych.v1 import inference_pb2 as inference
from protos.validation import check_ids, check_token_ids


async def encode_chat(
    served: ServedModel,
    worker: TextWorker,
    messages: Sequence[Message],
    body: TemplateInput,
    *,
    defaults: Mapping[str, Any],
    may_call: bool,
    special: bool,
    size: int,
) -> list[int]:
    """Returns the token ids of a conversation.

    Args:
        served: the model.
        worker: runs long work.
        messages: the conversation.
        body: further input of the template.
        defaults: the deployment's values of the template's variables.
        may_call: whether the model may call the tools; if not, a template that does not show tools gets no
            description of them.
        special: whether to add BOS and its like; usually not, because chat templates bring their own.
        size: bytes of the request's body.

    Raises:
        InvalidArgument: if there is no chat template, or it refuses the messages.
    """
    template = served.text.tool_template if body.tools else served.text.chat_template
    if template is None:
        raise InvalidArgument(
            f"the model '{served.model.served_name}' has no chat template; use /v1/completions",
            param="messages",
        )
    work = partial(_write_chat, template, messages, body, defaults, served.text.shown, may_call=may_call)
    text = await worker.run(size, work, inline=False)
    if ignored := list(_ignored(body, template.variables)):
        names = [clip(name) for name in ignored[:32]]
        get_logger().debug("the chat template does not read some parameters", fields=names)
    return await worker.run(len(text), partial(served.text.encode, text, add_special_tokens=special))


def _write_chat(
    template: ChatTemplate,
    messages: Sequence[Message],
    body: TemplateInput,
    defaults: Mapping[str, Any],
    shown: Derived,
    *,
    may_call: bool,
) -> str:
    arguments = (call.function.arguments or "" for message in messages for call in message.tool_calls)
    check_counts(",".join(arguments).encode(), param="messages")
    tools = [tool.for_template() for tool in body.tools]
    turns = [message.for_template() for message in messages]
    if shown.arguments_as_text:
        for call in (call for turn in turns for call in turn.get("tool_calls", ())):
            call["function"]["arguments"] = _json(call["function"]["arguments"])
    variables = template_variables(body, defaults)
    return template.render(
        show_tools_in_words(template, turns, tools if may_call else (), shown.tools),
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
        variables={name: value for name, value in variables.items() if name in template.variables},
        tools=tools,
        documents=body.documents,
    )


def template_variables(body: TemplateInput, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the variables that ``body`` or the deployment's ``defaults`` set for chat templates."""
    effort: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        # For templates that know no degrees, a switch.
        effort = dict.fromkeys(SWITCHES, body.reasoning_effort != "none")
        effort["reasoning_effort"] = body.reasoning_effort
    return {**defaults, **effort, **body.chat_template_kwargs}


def _ignored(body: TemplateInput, known: frozenset[str]) -> Iterator[str]:
    if body.reasoning_effort is not None and known.isdisjoint(("reasoning_effort", *SWITCHES)):
        yield "reasoning_effort"
    if body.documents and "documents" not in known:
        yield "documents"
    yield from (f"chat_template_kwargs.{name}" for name in body.chat_template_kwargs if name not in known)


_INTRODUCTION: Final = (
    "You can call these functions, described in JSON. To call some, answer with nothing but"
)
_AS_LIST: Final = 'a JSON list of objects with "name" and "parameters":'
_EXAMPLE: Final = Call("NAME", {"PARAMETER": "VALUE"})


def show_tools_in_words(
    template: ChatTemplate,
    turns: Sequence[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    form: Format | None = None,
) -> list[dict[str, Any]]:
    """Returns ``turns`` with descriptions of the tools and calls that ``template`` would not show.

    The model is asked for calls in ``form``, or without it in a JSON list.
    """
    described = [_calls_in_words(turn) if not template.knows_calls else turn for turn in turns]
    if not tools or template.knows_tools:
        return described
    asked = _AS_LIST if form is None else f"text in this form:\n{write(form, [_EXAMPLE])}\nThe functions:"
    text = "\n".join([f"{_INTRODUCTION} {asked}", *(_json(tool["function"]) for tool in tools)])
    # Every template accepts a user's turn; some refuse a system's.
    for at, turn in enumerate(described):
        if turn["role"] in ("system", "developer"):
            described[at] = {**turn, "content": f"{joined(turn['content'])}\n\n{text}"}
            return described
        if turn["role"] == "user":
            described[at] = {**turn, "content": f"{text}\n\n{joined(turn['content'])}"}
            return described
    return [{"role": "system", "content": text}, *described]


def _calls_in_words(turn: dict[str, Any]) -> dict[str, Any]:
    if not (calls := turn.get("tool_calls")):
        return turn
    text = _json(
        [{"name": call["function"]["name"], "parameters": call["function"]["arguments"]} for call in calls]
    )
    content = joined(turn["content"])
    return {**turn, "content": f"{content}\n{text}" if content else text}


def _json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise InvalidArgument(
            "the arguments of an earlier call are nested too deep; flatten them", param="messages"
        ) from error


# Parameters that are numbers on both sides, under one name. A value without effect stays unset, so that a
# worker that does not support the parameter has nothing to refuse.
_SCALARS: Final = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip


async def encode_prompts(
    served: ServedModel,
    worker: TextWorker,
    prompts: Sequence[str | list[int]],
    *,
    special: bool,
    size: int,
    param: str,
) -> list[list[int]]:
    """Returns the token ids of each prompt; prompts given as ids stay unchanged.

    The bytes of the request's body, ``size``, bound the effort. Errors call the prompts ``param``.

    Raises:
        InvalidArgument: if an id is beyond the vocabulary.
    """
    vocab_size = served.model.vocab_size

    def work() -> list[list[int]]:
        encoded = []
        for prompt in prompts:
            if isinstance(prompt, str):
                encoded.append(served.text.encode(prompt, add_special_tokens=special))
                continue
            if vocab_size:
                check_ids(param, prompt, vocab_size)
            encoded.append(prompt)
        return encoded

    return await worker.run(size, work)


def check_length(served: ServedModel, prompt: Sequence[int], limit: int | None, *, param: str) -> None:
    """Refuses a prompt that cannot run, in the client's names of parameters, unknown to the scheduler."""
    context, count = served.model.max_model_len, len(prompt)
    if count == 0:
        raise InvalidArgument(f"'{param}' is empty: it must give at least one token", param=param)
    if count + (limit or 1) > context:
        if limit is None or count >= context:
            asked, advice = (
                f"the prompt has {count} tokens, which leaves no room for an answer",
                "shorten the prompt",
            )
        else:
            asked = (
                f"the prompt has {count} tokens and the request asks for {limit} more, "
                f"{count + limit} together"
            )
            advice = f"shorten the prompt or ask for at most {context - count} tokens"
        raise ContextExceeded(
            # LiteLLM and others know this error by OpenAI's first words.
            f"This model's maximum context length is {context} tokens, but {asked}; {advice}",
            param=param,
        )


def truncated(served: ServedModel, body: SamplingRequest, prompt: list[int]) -> list[int]:
    """Returns the tokens of ``prompt`` kept by truncate_prompt_tokens."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return prompt
    room = served.model.max_model_len - (body.output_limit or 1)
    if keep > room:
        raise InvalidArgument(
            f"truncate_prompt_tokens={keep} keeps more than the {max(0, room)} tokens that fit into the"
            f" context of {served.model.max_model_len} beside the answer; keep fewer, or send -1",
            param="truncate_prompt_tokens",
        )
    if keep == -1:
        keep = room
    if len(prompt) <= keep or keep < 1:
        return prompt
    return prompt[:keep] if body.truncation_side == "right" else prompt[-keep:]


def bad_word_tokens(text: TextCodec, words: Sequence[str]) -> list[list[int]]:
    """Returns the token sequences of ``words``.

    A word gets a sequence for the start of a text, and a second for the position after a space if that
    begins with another token and is as long, as in vLLM.
    """
    found: list[list[int]] = []
    for word in words:
        plain = text.encode(word.lstrip(), add_special_tokens=False)
        if not plain:
            raise InvalidArgument(
                f"'bad_words' has {quote(word)}, which has no tokens; omit it", param="bad_words"
            )
        found.append(plain)
        spaced = text.encode(f" {word.lstrip()}", add_special_tokens=False)
        if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            found.append(spaced)
    return found


def check_logprobs(body: SamplingRequest, most: int) -> None:
    """Refuses a request for more log-probabilities than the deployment allows."""
    own = "top_logprobs" if hasattr(body, "top_logprobs") else "logprobs"
    for param, count in ((own, body.num_logprobs), ("prompt_logprobs", body.num_prompt_logprobs)):
        if count is not None and count > most:
            raise InvalidArgument(
                f"{param} is {count}, but this deployment reports at most {most} log-probabilities with each token;"
                " ask for fewer",
                param=param,
            )


def log_requests(requests: Sequence[inference.GenerateRequest]) -> None:
    """Logs a client's request without its texts: counts of tokens, and numeric parameters."""
    sampling = requests[0].sampling
    numbers = {
        field.name: value for field, value in sampling.ListFields() if isinstance(value, bool | int | float)
    }
    get_logger().info(
        "request",
        requests=[request.request_id for request in requests],
        prompt_tokens=[len(request.prompt_token_ids) for request in requests],
        n=requests[0].n or 1,
        lora=requests[0].lora_name or None,
        constrained=sampling.HasField("structured_output"),
        **numbers,
    )


def sampling_of(
    body: SamplingRequest, model: pb.ModelInfo, constraint: pb.StructuredOutput | None = None
) -> pb.SamplingParams:
    """Returns the body's sampling parameters; the model's recommended values replace unset ones.

    A value that switches a filter off stays unset, so a worker without the filter does not refuse it.
    ``constraint`` is the grammar of the whole output, thinking and calls included.
    """
    params = pb.SamplingParams()
    params.CopyFrom(model.default_sampling)
    for name in _SCALARS:
        value = getattr(body, name)
        if value is not None:
            params.ClearField(name)
            if value not in SAMPLING[name].off:
                setattr(params, name, value)
    if body.top_k is not None:
        params.ClearField("top_k")
        if body.top_k > 0:
            params.top_k = body.top_k
    if body.seed is not None:
        # vLLM's API allows negative seeds; the wire has 64 bits either way.
        params.seed = body.seed % 2**64
    if body.output_limit is not None:
        params.max_tokens = body.output_limit
    params.min_tokens = body.min_tokens
    params.ignore_eos = body.ignore_eos
    params.stop_token_ids.extend(body.stop_token_ids)
    params.allowed_token_ids.extend(body.allowed_token_ids or ())
    params.logit_bias.update(body.logit_bias or {})
    if body.num_logprobs is not None:
        params.logprobs = body.num_logprobs
    if body.num_prompt_logprobs is not None:
        params.prompt_logprobs = body.num_prompt_logprobs
    if constraint is not None:
        params.structured_output.CopyFrom(constraint)
    if model.vocab_size:
        check_token_ids(params, model.vocab_size)
    return params


def _for_prompt(
    served: ServedModel,
    body: SamplingRequest,
    sampling: pb.SamplingParams,
    num_prompt: int,
    budget: pb.ThinkingBudget | None,
) -> pb.SamplingParams:
    """Returns the parameters for a prompt: the model's recommended length counts as far as it fits."""
    is_recommended = body.output_limit is None and bool(sampling.max_tokens)
    if not is_recommended and budget is None:
        return sampling
    own = pb.SamplingParams()
    own.CopyFrom(sampling)
    if is_recommended:
        room = served.model.max_model_len - num_prompt
        own.max_tokens = max(body.min_tokens, min(sampling.max_tokens, room))
    if budget is not None:
        own.thinking_budget.CopyFrom(budget)
    return own


# Parameters of all prompts of a request: each prompt has its own copy.
_MAX_PARAMETER_BYTES: Final = 16 * 1024 * 1024


def generate_requests(
    served: ServedModel,
    body: SamplingRequest,
    prompts: Sequence[Sequence[int]],
    request_id: str,
    *,
    account: Account = NO_ACCOUNT,
    bad_words: Sequence[Sequence[int]] = (),
    constraint: pb.StructuredOutput | None = None,
    budget: Callable[[Sequence[int]], pb.ThinkingBudget | None] = lambda _: None,
) -> list[inference.GenerateRequest]:
    """Returns a wire request per prompt; several append their index to ``request_id``.

    ``budget`` returns the budget of thinking for a prompt.

    Raises:
        InvalidArgument: if a prompt cannot run, or a token id is beyond the vocabulary.
    """
    for prompt in prompts:
        check_length(served, prompt, body.output_limit, param=body.prompt_param)
    sampling = sampling_of(body, served.model, constraint)
    for token_ids in bad_words:
        sampling.bad_words.add(token_ids=token_ids)
    if (size := sampling.ByteSize() * len(prompts)) > _MAX_PARAMETER_BYTES:
        raise InvalidArgument(
            f"the parameters of all {len(prompts)} prompts take {size} bytes; send at most {_MAX_PARAMETER_BYTES},"
            " with fewer prompts or shorter lists",
            param=body.prompt_param,
        )
    return [
        inference.GenerateRequest(
            request_id=f"{request_id}-{index}" if len(prompts) > 1 else request_id,
            prompt_token_ids=prompt,
            sampling=_for_prompt(served, body, sampling, len(prompt), budget(prompt)),
            n=body.n if body.n > 1 else None,
            priority=account.priority,
            tenant=account.tenant,
            cache_salt=account.cache_salt,
            model=served.model.served_name,
            lora_name=served.adapter_of(body.model),
        )
        for index, prompt in enumerate(prompts)
    ]
