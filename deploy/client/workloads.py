"""The prompts of `triptych bench`: three workloads of `vllm bench serve`."""

import asyncio
import json
import random
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, floor
from pathlib import Path
from string import ascii_lowercase
from typing import Any, Final

import httpx

from deploy.client.connection import ClientError, check

# The lengths in tokens that vLLM takes from a sharegpt file.
_SHORTEST: Final = 4
_LONGEST_PROMPT: Final = 1024
_LONGEST_IN_ALL: Final = 2048
# Conversations that are tokenized at once.
_AT_ONCE: Final = 16


@dataclass(frozen=True)
class Prompt:
    """One request of a workload."""

    prompt: str | list[int]
    """Text, or token ids."""
    num_tokens: int
    max_tokens: int


@dataclass(frozen=True)
class Server:
    """The server that is measured, which also counts tokens."""

    http: httpx.AsyncClient
    model: str

    async def tokenize(self, text: str, *, special: bool) -> list[int]:
        """Returns the token ids of a text.

        Raises:
            ClientError: the server does not tokenize.
        """
        body = {"model": self.model, "prompt": text, "add_special_tokens": special}
        response = await self.http.post("/tokenize", json=body)
        check(response.status_code, response.content)
        return [int(token) for token in response.json()["tokens"]]

    async def detokenize(self, tokens: list[int]) -> str:
        """Returns the text of token ids.

        Raises:
            ClientError: the server does not detokenize.
        """
        response = await self.http.post("/detokenize", json={"model": self.model, "tokens": tokens})
        check(response.status_code, response.content)
        return str(response.json()["prompt"])


async def random_prompts(
    server: Server,
    count: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    seed: int,
) -> list[Prompt]:
    """Returns prompts of random tokens.

    Args:
        server: names the tokens.
        count: the number of prompts.
        input_len: tokens after the prefix.
        output_len: tokens of an answer.
        range_ratio: both lengths are spread evenly over this share below and above.
        prefix_len: tokens with which all prompts begin.
        seed: repeats them.
    """
    tokens = await _ordinary_tokens(server)
    source = random.Random(seed)  # noqa: S311 - no secrets
    prefix = source.choices(tokens, k=prefix_len)

    def length(usual: int) -> int:
        return max(1, source.randint(floor(usual * (1 - range_ratio)), ceil(usual * (1 + range_ratio))))

    prompts = []
    for _ in range(count):
        size = length(input_len)
        prompt = [*prefix, *source.choices(tokens, k=size)]
        prompts.append(Prompt(prompt, len(prompt), length(output_len)))
    return prompts


async def as_text(server: Server, prompts: list[Prompt]) -> list[Prompt]:
    """Returns the prompts with text instead of token ids, as chats need them."""

    async def written(prompt: Prompt) -> Prompt:
        if isinstance(prompt.prompt, str):
            return prompt
        return replace(prompt, prompt=await server.detokenize(prompt.prompt))

    found: list[Prompt] = []
    for first in range(0, len(prompts), _AT_ONCE):
        found += await asyncio.gather(*map(written, prompts[first : first + _AT_ONCE]))
    return found


async def repeated_prefixes(
    server: Server,
    count: int,
    *,
    prefix_len: int,
    suffix_len: int,
    num_prefixes: int,
    output_len: int,
    seed: int,
) -> list[Prompt]:
    """Returns prompts that share prefixes of random tokens, the same number for each prefix, in random order.

    There are at least as many prompts as prefixes.
    """
    tokens = await _ordinary_tokens(server)
    source = random.Random(seed)  # noqa: S311 - no secrets
    prefixes = [source.choices(tokens, k=prefix_len) for _ in range(num_prefixes)]
    prompts = [
        Prompt([*prefix, *source.choices(tokens, k=suffix_len)], prefix_len + suffix_len, output_len)
        for prefix in prefixes
        for _ in range(count // num_prefixes)
    ]
    source.shuffle(prompts)
    return prompts


async def sharegpt_prompts(
    server: Server, count: int, *, path: Path, output_len: int | None, seed: int
) -> list[Prompt]:
    """Returns the first messages of conversations, with answers as long as the recorded ones.

    Conversations that are very short or long are left out, as in vLLM. If too few are left, some repeat.

    Args:
        server: counts the tokens.
        count: the number of prompts.
        path: a JSON file: a list of objects with `conversations`, whose elements have `value`.
        output_len: the length of all answers instead of the recorded ones.
        seed: chooses the conversations.

    Raises:
        ClientError: the file cannot be read, or has no conversation that fits.
    """
    pairs = _conversations(path)
    source = random.Random(seed)  # noqa: S311 - no secrets
    source.shuffle(pairs)
    found: list[Prompt] = []

    async def measured(question: str, answer: str) -> Prompt:
        size = len(await server.tokenize(question, special=True))
        wanted = output_len or len(await server.tokenize(answer, special=True))
        return Prompt(question, size, wanted)

    while pairs and len(found) < count:
        some, pairs = pairs[:_AT_ONCE], pairs[_AT_ONCE:]
        prompts = await asyncio.gather(*(measured(*pair) for pair in some))
        found += [prompt for prompt in prompts if _fits(prompt, any_answer=output_len is not None)]
    if not found:
        raise ClientError(f"{path} has no conversation of {_SHORTEST} to {_LONGEST_PROMPT} tokens")
    found = found[:count]
    return found + source.choices(found, k=count - len(found))


def _fits(prompt: Prompt, *, any_answer: bool) -> bool:
    return (
        _SHORTEST <= prompt.num_tokens <= _LONGEST_PROMPT
        and (any_answer or prompt.max_tokens >= _SHORTEST)
        and prompt.num_tokens + prompt.max_tokens <= _LONGEST_IN_ALL
    )


def _conversations(path: Path) -> list[tuple[str, str]]:
    """Returns the first two messages of each conversation."""
    try:
        entries: Any = json.loads(path.read_text(encoding="utf-8"))
        turns: list[Any] = [entry.get("conversations") or () for entry in entries]
        return [(str(each[0]["value"]), str(each[1]["value"])) for each in turns if len(each) > 1]
    except OSError as error:
        raise ClientError(f"{path} cannot be read ({error.strerror}); change --dataset-path") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ClientError(
            f"{path} is not a list of conversations as in ShareGPT; change --dataset-path"
        ) from error


async def _ordinary_tokens(server: Server) -> list[int]:
    """Returns a few hundred token ids of any vocabulary, none of them special."""
    syllables = " ".join("".join(pair) for pair in product(ascii_lowercase, repeat=2))
    return sorted(set(await server.tokenize(syllables, special=False)))
