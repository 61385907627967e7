"""Plain completions and tokens as clients of vLLM ask for them, with OpenAI's own client where it can."""

from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from tests.support.gateway.serving import CHAT, Stack, smollm2_folder, tokenizer_of

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]

HABITS: dict[str, Any] = {
    "logit_bias": {"5": -100}, "user": "me", "suffix": None, "best_of": 2, "n": 2, "stop": ["never"], "seed": 1,
    "temperature": 2.5,
}  # fmt: skip
# Of vLLM's fields, those that change nothing here.
VLLM_HABITS = {
    "stream_interval": 4,
    "session_id": "s",
    "thinking_token_budget": -1,
    "return_token_offsets": True,
}


@pytest.mark.parametrize("prompt", [["The capital", "A cat"], [[5, 6], [7, 8]]])
@pytest.mark.parametrize("streamed", [False, True])
async def test_several_prompts_with_all_of_the_clients_habits(
    stack: Stack, prompt: Any, streamed: bool
) -> None:
    """Choices are numbered prompt by prompt and begin with their own prompts, streamed or not."""
    tokenizer = tokenizer_of(smollm2_folder())
    given = [text if isinstance(text, str) else tokenizer.decode(text) for text in prompt]
    texts, logprobs = dict.fromkeys(range(4), ""), dict.fromkeys(range(4), 0)
    async with AsyncOpenAI(base_url=f"{stack.gateway.base_url}/v1", api_key="unused") as client:
        answer: Any = await client.completions.create(
            model="smollm2", prompt=prompt, max_tokens=3, echo=True, logprobs=1, stream=streamed,
            extra_body=VLLM_HABITS, **HABITS,
        )  # fmt: skip
        for choice in [one async for part in answer for one in part.choices] if streamed else answer.choices:
            texts[choice.index] += choice.text
            logprobs[choice.index] += len(choice.logprobs.tokens) if choice.logprobs else 0
    counts = [len(tokenizer.encode(text).ids) if isinstance(text, str) else len(text) for text in prompt]
    for choice, text in texts.items():
        assert text.startswith(given[choice // 2])
        assert len(text) > len(given[choice // 2])
        assert logprobs[choice] == counts[choice // 2] + 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"), ({"best_of": 3}, "best_of"), ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"), ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"use_beam_search": True}, "use_beam_search"), ({"prompt": ["a", [1]]}, "prompt"),
    ],
)  # fmt: skip
async def test_what_would_change_the_answer_is_refused_by_name(
    stack: Stack, fields: dict[str, Any], param: str
) -> None:
    """OpenAI's client raises the error with the parameter."""
    async with AsyncOpenAI(base_url=f"{stack.gateway.base_url}/v1", api_key="unused") as client:
        with pytest.raises(BadRequestError) as caught:
            await client.completions.create(model="smollm2", prompt="a", extra_body=fields)
    assert caught.value.param == param


async def test_tokens_are_counted_spelled_and_read_back(stack: Stack) -> None:
    """For texts and for conversations; ids beyond the vocabulary are refused, not dropped."""
    for body in ({"prompt": "The capital"}, CHAT, {**CHAT, "add_generation_prompt": False}):
        answer = await stack.post("/tokenize", **body, return_token_strs=True)
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        assert answer["max_model_len"] == 512
        text = (await stack.post("/detokenize", tokens=answer["tokens"]))["prompt"]
        again = await stack.post("/tokenize", prompt=text, add_special_tokens=False)
        assert again == {**answer, "token_strs": None}
    status, error = await stack.refusal("/detokenize", tokens=[5, 10**6])
    assert (status, error["param"]) == (400, "tokens")
