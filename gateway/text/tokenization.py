"""Prefixes of an embedding model's texts: the prompts of Sentence Transformers."""

import asyncio
import bisect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import jinja2
from tokenizers import Encoding, Tokenizer

from gateway.schemas.base import clip
from gateway.text.chat_template import ChatTemplate
from gateway.text.cpu_time import OutOfCpuTime, limited
from gateway.text.derive import Derived, derive
from gateway.text.detokenizer import DetokenizerFactory
from protos.errors import ContextExceeded, Internal, InvalidArgument, Overloaded
from protos.service.backpressure import TENANT

PROMPTS_FILE: Final = "config_sentence_transformers.json"

# The names of the prompts for both sides of a search, in the order that Sentence Transformers documents.
_QUERY: Final = "query"
_DOCUMENT: Final = ("document", "passage", "corpus")


@dataclass(frozen=True, slots=True)
class TextPrompts:
    """The prompts of a model."""

    by_name: Mapping[str, str] = field(default_factory=dict)
    default: str = ""
    """In front of every text unless a request says otherwise."""

    @property
    def query(self) -> str:
        """In front of a text that others are compared with."""
        return self._side((_QUERY,))

    @property
    def document(self) -> str:
        """In front of a text that may answer a query."""
        return self._side(_DOCUMENT)

    def _side(self, names: Iterable[str]) -> str:
        """Returns the first prompt of these names; the default only if neither side has a prompt."""
        if self.by_name.keys().isdisjoint((_QUERY, *_DOCUMENT)):
            return self.default
        return next((self.by_name[name] for name in names if name in self.by_name), "")

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "TextPrompts":
        """Reads the contents of ``PROMPTS_FILE``; an empty mapping if the model has none."""
        found = config.get("prompts")
        names = found if isinstance(found, dict) else {}
        prompts = {name: text for name, text in names.items() if isinstance(text, str)}
        return cls(prompts, prompts.get(str(config.get("default_prompt_name")), ""))

    def choose(self, name: str | None, text: str | None) -> str:
        """Returns the prompt of a request, by name or its own."""
        if name is None:
            return self.default if text is None else text
        if name not in self.by_name:
            known = ", ".join(f"'{clip(each)}'" for each in self.by_name)
            advice = f"it has {known}" if known else "it has none; send the text as 'prompt'"
            raise InvalidArgument(
                f"the model has no prompt called '{clip(name)}': {advice}", param="prompt_name"
            )
        return self.by_name[name]


T = TypeVar("T")

# Encoding so many bytes takes well under a millisecond; a hop to another thread would cost more.
_INLINE_SIZE: Final = 2_000

# Texts have threads by their size, so that short ones never wait for long ones.
_SIZES: Final = (_INLINE_SIZE, 256 * 1024)
_THREADS: Final = 2

# Bytes of JSON or token ids that are parsed or copied for the cost of a byte of text for the tokenizer.
_LIGHTER: Final = 8

# CPU time of one piece of work for a request, seconds. The largest body takes less than half of it.
_CPU_S: Final = 10

# Tokens of one text. Each copy of a list of them holds up all other threads, and while the library encodes it
# keeps some 280 bytes for each.
_MAX_TOKENS: Final = 500_000
# Its bytes: a word of so many blanks takes two seconds.
_MAX_BYTES: Final = 2_500_000
# Characters of a longer text that are counted at a time, and tokens that a cut may add.
_PIECE: Final = 128 * 1024
_CUT: Final = 256

_NAMED_TOKENS: Final = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip

# The roles of vLLM's score templates.
_PAIR_ROLES: Final = {"query", "document"}
_QUOTED: Final = re.compile(r"""["'](\w+)["']""")


class TextCodec:
    """The tokenizer and chat template of a model. Immutable once loaded, so all threads may use it."""

    tokenizer: Tokenizer
    """The library's own object."""
    chat_template: ChatTemplate | None
    """The template, or ``None`` if the model has none."""
    tool_template: ChatTemplate | None
    """The template for conversations with tools; usually the same."""
    shown: Derived
    """The formats of tool calls and thinking that the template for tools shows."""
    pair_template: ChatTemplate | None
    """The template, if it writes a pair of texts as turns of the roles "query" and "document"."""
    prompts: TextPrompts
    """The prompts of an embedding model."""
    special_tokens: dict[str, str]
    """``bos_token``, ``eos_token`` and so on, by name."""
    config: dict[str, Any]
    """tokenizer_config.json."""
    detokenizers: DetokenizerFactory
    """Makes the incremental detokenizers."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        special_tokens: dict[str, str],
        tool_template: ChatTemplate | None = None,
        prompts: TextPrompts | None = None,
        config: dict[str, Any] | None = None,
    ) -> None:
        self.config = config or {}
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.tool_template = tool_template or chat_template
        writes_pairs = chat_template is not None and set(_QUOTED.findall(chat_template.source)) >= _PAIR_ROLES
        self.pair_template = chat_template if writes_pairs else None
        self.prompts = prompts or TextPrompts()
        added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        self.shown = derive(self.tool_template, added) if self.tool_template else Derived()
        self.special_tokens = special_tokens
        self.detokenizers = DetokenizerFactory(tokenizer)

    @classmethod
    def load(cls, folder: Path, template: str | None = None) -> "TextCodec":
        """Reads a model's tokenizer and chat template, unless given, from ``folder``. Takes 0.1 s or more.

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
        # The file may keep truncation and padding from training.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        special = _special_tokens(config, _read_json(folder / "special_tokens_map.json"))
        sources = _template_sources(folder, config) if template is None else {"default": template}
        try:
            templates = {name: ChatTemplate(source, special) for name, source in sources.items()}
        except jinja2.TemplateSyntaxError as error:
            raise Internal(
                f"the model's chat template cannot be compiled: line {error.lineno}: {error.message};"
                " correct it, or replace it with --chat-template"
            ) from error
        prompts = TextPrompts.read(_read_json(folder / PROMPTS_FILE))
        return cls(tokenizer, templates.get("default"), special, templates.get("tool_use"), prompts, config)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns the token ids of ``text``. Recognizes special tokens in it, as transformers does.

        ``add_special_tokens`` adds those that the model expects around a text (BOS), as tokenizer.json says.
        Like transformers 5, this ignores ``add_bos_token`` in the configuration. Chat templates bring their
        own.
        """
        return token_ids(self.tokenizer, text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Returns the text of ``token_ids``."""
        detokenizer = self.detokenizers.make(skip_special_tokens=skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.finish()

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the vocabulary's spelling of each token."""
        return [self.tokenizer.id_to_token(token_id) or "" for token_id in token_ids]


class TextWorker:
    """Runs slow text work in threads and quick work in the event loop.

    The tokenizer releases the interpreter lock while it encodes, so other requests' streams continue
    meanwhile.
    """

    def __init__(self, max_waiting: int = 256) -> None:
        """Starts its threads when they are needed; ``max_waiting`` slow requests may wait for one.

        As many of a tenant as there are free places: of one that is alone, half.
        """
        names = ("text", "text_middle", "text_long")
        self._pools = [ThreadPoolExecutor(_THREADS, thread_name_prefix=name) for name in names]
        self._unfinished = [Counter[str]() for _ in names]
        self._max_waiting = max_waiting

    async def run(self, size: int, work: Callable[[], T], *, inline: bool = True) -> T:
        """Returns the result of ``work``, whose effort grows with ``size`` (bytes or token ids).

        Without ``inline``, it always runs in a thread, because its effort may grow with something else.

        Raises:
            Overloaded: if too much work waits already.
            InvalidArgument: if it takes too much CPU time.
        """
        if inline and size <= _INLINE_SIZE:
            return work()
        if size > _INLINE_SIZE:
            unfinished = self._unfinished[_lane(size)]
            free = self._max_waiting + _THREADS - unfinished.total()
            own = max(0, unfinished[TENANT.get()] - _THREADS)
            if free <= own:
                raise Overloaded(
                    f"too many long texts are waiting to be read, {own} of them the tenant's; retry later",
                    retry_after_ms=1000,
                )
        return await self._in_thread(size, partial(_in_time, work))

    async def run_light(self, size: int, work: Callable[[], T]) -> T:
        """Does the same as :meth:`run` for work that parses or copies ``size`` bytes of JSON or token ids."""
        return await self.run(size // _LIGHTER, work)

    async def finish(self, size: int, work: Callable[[], T]) -> T:
        """Does the same as :meth:`run` for a generated answer, which is never refused."""
        return work() if size <= _INLINE_SIZE else await self._in_thread(size, work)

    async def _in_thread(self, size: int, work: Callable[[], T]) -> T:
        lane, tenant = _lane(size), TENANT.get()
        self._unfinished[lane][tenant] += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pools[lane], work)
        finally:
            self._unfinished[lane][tenant] -= 1
            if not self._unfinished[lane][tenant]:
                del self._unfinished[lane][tenant]

    def close(self) -> None:
        """Refuses new work; running work finishes."""
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)


def _lane(size: int) -> int:
    return bisect.bisect_left(_SIZES, size)


def _in_time(work: Callable[[], T]) -> T:
    try:
        with limited(_CPU_S):
            return work()
    except OutOfCpuTime:
        raise InvalidArgument(
            f"preparing the request takes more than {_CPU_S} s of CPU time; send less at once"
        ) from None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Internal(f"{path.name} cannot be read: {error}") from error
    return value if isinstance(value, dict) else {}


def _special_tokens(config: dict[str, Any], special_map: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name in _NAMED_TOKENS:
        value = config.get(name, special_map.get(name))
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _template_sources(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Returns the sources of the templates "default" and "tool_use", if they exist.

    A source is a file, or an entry in the configuration: a text, or several by name.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return {"default": path.read_text(encoding="utf-8")}
        except UnicodeDecodeError as error:
            raise Internal(f"{path.name} cannot be read: {error}") from error
    template = config.get("chat_template", _read_json(folder / "chat_template.json").get("chat_template"))
    if isinstance(template, list):
        by_name = {entry["name"]: entry["template"] for entry in template}
        return {name: by_name[name] for name in ("default", "tool_use") if name in by_name}
    return {"default": template} if isinstance(template, str) else {}


def token_ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Returns the token ids of ``text``. Recognizes special tokens in it, as transformers does.

    The library keeps Python's global lock while it encodes a single text, but not for a batch. A text of 8
    MB takes seconds, in which every stream would stand still.

    Raises:
        ContextExceeded: if there are more than half a million, or the text has 2.5 MB.
    """
    if len(text) <= _INLINE_SIZE:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
    if (num_bytes := len(text.encode(errors="replace"))) > _MAX_BYTES:
        raise ContextExceeded(f"a text has {num_bytes} bytes; send at most {_MAX_BYTES} in one text")
    # Few tokens are less than a byte. Counting by pieces needs no more memory for a longer text.
    if num_bytes > _MAX_TOKENS:
        count = 0
        for start in range(0, len(text), _PIECE):
            count += len(_encode(tokenizer, text[start : start + _PIECE])) - _CUT
            _check_count(count)
    encoding = _encode(tokenizer, text, add_special_tokens=add_special_tokens)
    _check_count(len(encoding))
    return list(encoding.ids)


def _encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> Encoding:
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]


def _check_count(count: int) -> None:
    if count > _MAX_TOKENS:
        raise ContextExceeded(f"a text has more than {_MAX_TOKENS} tokens; send several shorter ones")
