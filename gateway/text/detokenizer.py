"""Incremental detokenization: never half a character, never text that a later token would change.

Most tokenizers decode *bytewise*: each token stands for bytes independent of its neighbours, and the text is
those bytes read as UTF-8. For them, a table from id to bytes and an incremental UTF-8 decoder are exact and
cost well under a microsecond per token. Others, such as word pieces, decode a short window of recent tokens
again. Stop strings are found in the text, across token boundaries.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Protocol

from tokenizers import Tokenizer

REPLACEMENT: Final = "\ufffd"

# How tokenizers with byte fallback write a byte: `<0x0A>`.
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Prompt tokens that a windowed decoder sees before the first new token, so that a leading space is kept or
# dropped correctly.
_CONTEXT_TOKENS: Final = 6

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """Turns a sequence's tokens into text."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Returns the text that these further tokens complete; may be empty in the middle of a character."""

    def finish(self) -> str:
        """Returns the text held back, at the end of the sequence; incomplete characters become U+FFFD.

        Call once.
        """


def _gpt2_bytes() -> dict[str, int]:
    """Returns byte-level BPE's printable stand-ins for the 256 bytes (GPT-2's ``bytes_to_unicode``)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    shifted = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(shifted)}


_GPT2_BYTES: Final = _gpt2_bytes()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_GPT2_BYTES[char] for char in token])
    except KeyError:
        # An added token is written in plain text.
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace("▁", " ").encode()


def _bytewise_rule(decoder: dict[str, Any] | None) -> Callable[[str], bytes] | None:
    """Returns a decoder's function from token to bytes; ``None`` if neighbours matter.

    The trailing ``Strip`` of sentencepiece models drops the space before a text's first word. It never
    applies here, because generated text continues a prompt.
    """
    if decoder is None:
        return None
    stages = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [stage["type"] for stage in stages]
    neutral = {"ByteFallback", "Fuse", "Strip"}
    for stage in stages:
        if stage["type"] == "Replace" and stage["pattern"] == {"String": "▁"} and stage["content"] == " ":
            neutral.add("Replace")
    if kinds[-1] == "ByteLevel" and neutral.issuperset(kinds[:-1]):
        return _byte_level
    if "ByteFallback" in kinds and "Replace" in neutral and neutral.issuperset(kinds):
        return _sentencepiece
    return None


class _TokenBytes(dict[int, bytes]):
    """The bytes of each token id, filled on first use: most of a vocabulary is never generated."""

    def __init__(self, tokenizer: Tokenizer, rule: Callable[[str], bytes], skipped: frozenset[int]) -> None:
        super().__init__(dict.fromkeys(skipped, b""))
        self._tokenizer = tokenizer
        self._rule = rule

    def __missing__(self, token_id: int) -> bytes:
        # A model's vocabulary is often padded beyond the tokenizer's; the extra ids have no text.
        token = self._tokenizer.id_to_token(token_id)
        value = self[token_id] = b"" if token is None else self._rule(token)
        return value


class BytewiseDetokenizer:
    """Decodes tokens of bytes. Holds back at most the bytes of an unfinished character."""

    __slots__ = ("_bytes", "_decode")

    def __init__(self, token_bytes: _TokenBytes) -> None:
        self._bytes = token_bytes
        self._decode = _utf8_decoder("replace").decode

    def push(self, token_ids: Iterable[int]) -> str:
        """See :class:`Detokenizer`."""
        table = self._bytes
        return self._decode(b"".join([table[token_id] for token_id in token_ids]))

    def finish(self) -> str:
        """See :class:`Detokenizer`."""
        return self._decode(b"", final=True)


class WindowedDetokenizer:
    """Decodes the tokens of any tokenizer: a window of recent tokens again with each new token.

    It emits the new token's addition to the window's text. The window starts at the last token boundary
    after settled text. vLLM and TGI call its ends prefix and read offset.
    """

    __slots__ = ("_decode", "_glued", "_ids", "_read", "_settled", "_start")

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        context: Sequence[int],
        glued: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """Starts after ``context``.

        Args:
            decode: returns the text of a few tokens.
            context: the last tokens of the prompt.
            glued: tokens written without a space between them, with their spelling.
        """
        self._decode = decode
        self._glued = glued
        self._ids = list(context)
        self._start = 0
        self._read = len(self._ids)
        self._settled = decode(self._ids)

    def push(self, token_ids: Iterable[int]) -> str:
        """See :class:`Detokenizer`."""
        return "".join(map(self._push_one, token_ids))

    def _push_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids[self._start :])
        if len(text) <= len(self._settled) or text.endswith(REPLACEMENT):
            return ""
        delta = text[len(self._settled) :]
        if token_id in self._glued and len(self._ids) > 1 and self._ids[-2] in self._glued:
            delta = self._glued[token_id]
        self._start, self._read = self._read, len(self._ids)
        self._settled = self._decode(self._ids[self._start :])
        return delta

    def finish(self) -> str:
        """See :class:`Detokenizer`."""
        return self._decode(self._ids[self._start :])[len(self._settled) :]


class DetokenizerFactory:
    """Makes detokenizers for a tokenizer. All sequences share its tables."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = tokenizer.decoder
        self._rule = _bytewise_rule(json.loads(decoder.__getstate__()) if decoder is not None else None)
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special = {token.content: token_id for token_id, token in added.items() if token.special}
        # Keyed by the special tokens that are skipped: a handful of sets, because each format has its
        # markers.
        self._tables: dict[frozenset[int], _TokenBytes] = {}
        self._skipped: dict[frozenset[str], frozenset[int]] = {}

    def _without(self, shown: frozenset[str]) -> frozenset[int]:
        """Returns the special tokens in none of the texts."""
        skipped = self._skipped.get(shown)
        if skipped is None:
            special = self._special.items()
            skipped = frozenset(i for content, i in special if not any(content in text for text in shown))
            self._skipped[shown] = skipped
        return skipped

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that a token stands for, special tokens included; may be part of a character."""
        if self._rule is not None:
            return self._table(frozenset(), self._rule)[token_id]
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text.encode()

    def _table(self, skipped: frozenset[int], rule: Callable[[str], bytes]) -> _TokenBytes:
        table = self._tables.get(skipped)
        if table is None:
            table = self._tables[skipped] = _TokenBytes(self._tokenizer, rule, skipped)
        return table

    def make(
        self,
        *,
        skip_special_tokens: bool,
        shown: frozenset[str] = frozenset(),
        spaces_between_special_tokens: bool = True,
        prompt: Sequence[int] = (),
    ) -> Detokenizer:
        """Returns a detokenizer for a sequence.

        Args:
            skip_special_tokens: omit special tokens.
            shown: texts whose special tokens are kept; few different sets.
            spaces_between_special_tokens: whether a tokenizer with spaces between tokens also writes them
                between added tokens.
            prompt: the preceding tokens; the last few are enough.
        """
        skipped = self._without(shown) if skip_special_tokens else frozenset[int]()
        if self._rule is not None:
            return BytewiseDetokenizer(self._table(skipped, self._rule))

        def decode(token_ids: list[int]) -> str:
            visible = [token_id for token_id in token_ids if token_id not in skipped]
            text: str = self._tokenizer.decode(visible, skip_special_tokens=False)
            return text

        glue = not spaces_between_special_tokens and not skip_special_tokens
        return WindowedDetokenizer(decode, prompt[-_CONTEXT_TOKENS:], self._added if glue else {})


class StopStrings:
    """Watches a sequence's text for the first of several strings.

    The match that ends first wins; of two that end together, the longer. So the cuts of the text do not
    matter. Only text that may become a stop string is held back.
    """

    __slots__ = ("_held", "_include", "_longest", "_stops", "matched")

    matched: str | None
    """The stop string that was found. Feed no more text afterwards."""

    def __init__(self, stops: Sequence[str], *, include_in_output: bool) -> None:
        """Watches for ``stops``, at least one string, none of them empty."""
        # Longest first: of matches that end together, the loop then keeps the longest.
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._longest = len(self._stops[0])
        self._include = include_in_output
        self._held = ""
        self.matched = None

    def feed(self, text: str) -> str:
        """Takes the next piece and returns the text that is ready to emit. Check ``matched`` afterwards."""
        if not text:
            return ""
        buffer = self._held + text
        end = len(buffer) + 1
        for stop in self._stops:
            at = buffer.find(stop)
            if at >= 0 and at + len(stop) < end:
                end = at + len(stop)
                self.matched = stop
        if self.matched is not None:
            self._held = ""
            return buffer[: end if self._include else end - len(self.matched)]
        keep = self._undecided(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """Returns the text held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, buffer: str) -> int:
        """Returns the length of the longest tail of ``buffer`` that begins a stop string."""
        for length in range(min(len(buffer), self._longest - 1), 0, -1):
            tail = buffer[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
