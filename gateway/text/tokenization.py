"""A model's text side, made from the tokenizer files that its worker sent: encode, decode, chat template.

Uses the ``tokenizers`` library directly: it reads the same ``tokenizer.json`` that transformers wraps.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

import jinja2
from tokenizers import Tokenizer

from gateway.text.chat_template import ChatTemplate
from gateway.text.detokenizer import DetokenizerFactory
from gateway.text.template_probe import thinks, tool_format
from protos.errors import Internal

T = TypeVar("T")

# Up to here an encode takes well under a millisecond; a hop to a thread would cost more than it saves.
_INLINE_SIZE: Final = 2_000

_NAMED_TOKENS: Final = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip


class TextCodec:
    """Tokenizer and chat template of one model. Immutable once loaded, so every thread may use it.

    Attributes:
        chat_template: the template, or ``None`` if the model has none.
        tool_template: the one for conversations with tools; usually the same.
        tool_format: how the model writes tool calls, a name of ``gateway.tools.formats``; ``None`` if its template does not show it.
        thinks: whether its template knows thinking between ``<think>`` and ``</think>``.
        tokenizer: the library's own object.
        detokenizers: makes the incremental detokenizers.
        special_tokens: ``bos_token`` and its like, by name.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        special_tokens: dict[str, str],
        tool_template: ChatTemplate | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.tool_template = tool_template or chat_template
        self.tool_format = tool_format(self.tool_template)
        self.thinks = thinks(chat_template)
        self.special_tokens = special_tokens
        self.detokenizers = DetokenizerFactory(tokenizer)
        self._wrapped: Any = None

    @classmethod
    def load(cls, folder: Path) -> "TextCodec":
        """Reads ``tokenizer.json``, ``tokenizer_config.json`` and the chat template from ``folder``. Takes 0.1 s and more.

        Raises:
            Internal: if a file is missing or cannot be read; the message names it.
        """
        config = _read_json(folder / "tokenizer_config.json")
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise Internal(
                "the model has no tokenizer.json; convert its tokenizer with transformers "
                "(AutoTokenizer.from_pretrained(...).save_pretrained(...)) and load that folder"
            )
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise Internal(f"tokenizer.json cannot be read: {error}") from error
        # Truncation and padding in the file are left-overs of training.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        special = _special_tokens(config, _read_json(folder / "special_tokens_map.json"))
        sources = _template_sources(folder, config)
        try:
            templates = {name: ChatTemplate(source, special) for name, source in sources.items()}
        except jinja2.TemplateSyntaxError as error:
            raise Internal(f"the model's chat template cannot be compiled: {error}") from error
        return cls(tokenizer, templates.get("default"), special, templates.get("tool_use"))

    def wrapped(self, wrap: Callable[[], Any]) -> Any:
        """What ``wrap`` makes of the tokenizer, made at the first call and kept: another library's wrapper copies all of it."""
        if self._wrapped is None:
            self._wrapped = wrap()
        return self._wrapped

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``; special tokens written in it are recognised, as in transformers.

        Args:
            text: the text.
            add_special_tokens: also add those that the model expects around a text (BOS), as tokenizer.json says; transformers 5
                ignores ``add_bos_token`` of the configuration beside it, too. Chat templates carry their own.
        """
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of all these tokens at once."""
        detokenizer = self.detokenizers.make(skip_special_tokens=skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.finish()

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each token."""
        return [self.tokenizer.id_to_token(token_id) or "" for token_id in token_ids]


class TextWorker:
    """Runs slow text work beside the event loop, quick work within it.

    The tokenizer releases the interpreter lock while it encodes; streams of other requests go on meanwhile.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="text")

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """The result of ``work``, whose effort grows with ``size`` (bytes, or token ids)."""
        if size <= _INLINE_SIZE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """Lets running work finish; no new work may come."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Internal(f"{path.name} cannot be read: {error}") from error
    return value if isinstance(value, dict) else {}


def _special_tokens(config: dict[str, Any], special_map: dict[str, Any]) -> dict[str, str]:
    """Named special tokens; a token is a string or an object with ``content``."""
    found = {}
    for name in _NAMED_TOKENS:
        value = config.get(name, special_map.get(name))
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _template_sources(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """The chat templates "default" and "tool_use", as far as they exist: a file, or inside the configuration (one text, or several by name)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return {"default": path.read_text(encoding="utf-8")}
    template = config.get("chat_template", _read_json(folder / "chat_template.json").get("chat_template"))
    if isinstance(template, list):
        by_name = {entry["name"]: entry["template"] for entry in template}
        return {name: by_name[name] for name in ("default", "tool_use") if name in by_name}
    return {"default": template} if isinstance(template, str) else {}
