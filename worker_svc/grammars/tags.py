"""Writes structural tags as rules of an llguidance grammar.

The form is xgrammar's. A special token has no text in a grammar, so none is allowed, except where a tag
writes its text (there a model may use the token or spell it) or names it. A text and the mark that ends it
are one terminal: llguidance reads each terminal as far as it goes.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from tokenizers import Tokenizer

from worker_svc.grammars.expressions import (
    ALL,
    ANY,
    EMPTY,
    AllOf,
    AnyOf,
    Chars,
    Not,
    Repeat,
    Rx,
    literal,
    parse_whole,
    terminal,
)
from worker_svc.grammars.expressions import Sequence as Joined
from worker_svc.grammars.gbnf import write_characters, write_gbnf
from worker_svc.grammars.grammar_writer import GrammarWriter, Repeated, Symbol
from worker_svc.grammars.json_schema import Schemas
from worker_svc.grammars.limits import MAX_EXPANDED, MAX_TAGS, refusal, shown
from worker_svc.grammars.notations import Marks, notation

_SOME: Final = AllOf((ANY, Not(EMPTY)))
_LOOP: Final = frozenset({"at_least_one", "stop_after_first"})
_FLAGS: Final = _LOOP | {"loop"}
# Fields of each part. Parts also take a field of another name if its value is null.
_FIELDS: Final[Mapping[str, set[str]]] = {
    "const_string": {"value"},
    "json_schema": {"json_schema", "style", "any_order", "max_whitespace_cnt", "excludes"},
    "any_text": {"excludes", "max_chars", "max_tokens"},
    "grammar": {"grammar"},
    "regex": {"pattern"},
    "sequence": {"elements"},
    "or": {"elements"},
    "optional": {"content"},
    "star": {"content"},
    "plus": {"content"},
    "repeat": {"content", "min", "max"},
    "tag": {"begin", "content", "end"},
    "triggered_tags": {"triggers", "tags", "excludes", *_LOOP},
    "token_triggered_tags": {"trigger_tokens", "tags", "exclude_tokens", *_LOOP},
    "tags_with_separator": {"tags", "separator", *_LOOP},
    "token": {"token"},
    "exclude_token": {"exclude_tokens"},
    "any_tokens": {"exclude_tokens", "max_tokens"},
    "dispatch": {"rules", "loop", "excludes"},
    "token_dispatch": {"rules", "loop", "exclude_tokens"},
}
# Fields that cannot be enforced, with the only value to accept.
_UNENFORCED: Final[Mapping[str, Mapping[str, Any]]] = {
    "json_schema": {"any_order": False, "max_whitespace_cnt": None, "excludes": []},
    "any_text": {"max_tokens": None},
}


def _check_fields(tag: dict[str, Any]) -> None:
    """Refuses fields of a part of a structural tag without an effect."""
    kind = tag.get("type")
    fields = _FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise refusal(f"structural_tag has the type {shown(kind)}, which is not supported")
    for name, value in tag.items():
        if name != "type" and name not in fields and value is not None:
            raise refusal(f"structural_tag has the field {shown(name)} in {kind}, which is not supported")
        if name in _FLAGS and not isinstance(value, bool | None):
            raise refusal(f"structural_tag has {shown(value)} as {name}, which must be true or false")
    for name, accepted in _UNENFORCED.get(str(kind), {}).items():
        if name in tag and tag[name] not in (None, accepted):
            raise refusal(f"structural_tag has {name} in {kind}, which cannot be enforced; omit it")
    if kind in ("any_text", "any_tokens"):
        for name in ("max_chars", "max_tokens"):
            most = tag.get(name)
            if most is not None and (type(most) is not int or not 0 <= most <= MAX_EXPANDED):
                raise refusal(
                    f"structural_tag has a {name} that is not a whole number from 0 to {MAX_EXPANDED}"
                )


class TokenNames:
    """The tokens of a vocabulary that a tag may name."""

    def __init__(self, load: Callable[[], Tokenizer], size: int, end_ids: Sequence[int]) -> None:
        """Loads the tokenizer when a tag needs it."""
        self._load = load
        self._size = size
        self.end_ids = end_ids

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self._load()

    @cached_property
    def specials(self) -> Mapping[str, int]:
        """Ids of special tokens not ending a sequence, by their text."""
        return {
            added.content: token_id
            for token_id, added in self._tokenizer.get_added_tokens_decoder().items()
            if added.special and added.content and token_id < self._size and token_id not in self.end_ids
        }

    def id_of(self, text: str) -> int:
        """Returns the id of the token with this text; refuses a text that no token has."""
        found = self._tokenizer.token_to_id(text)
        ids = [found] if found is not None else self._tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) != 1:
            raise refusal(f"structural_tag names the token {text!r}, which the vocabulary does not have")
        return int(ids[0])


class TagWriter:
    """Writes the rules of a structural tag."""

    def __init__(self, writer: GrammarWriter, tokens: TokenNames) -> None:
        self._writer = writer
        self._specials = tokens.specials
        self._hidden = {*tokens.specials.values(), *tokens.end_ids}
        self._id_of = tokens.id_of
        self._special = re.compile(
            "|".join(sorted(map(re.escape, tokens.specials), key=len, reverse=True)) or "(?!)"
        )
        self._plain_rules: dict[tuple[Rx, str], str] = {}
        self._count = 0
        self._by_character = False
        # Text that begins an optional part: free text after that part does not begin with it.
        self._optional_begin: Any = None
        self._writers: dict[str, Callable[[dict[str, Any], bool], Sequence[Symbol]]] = {
            "const_string": lambda tag, _: self._text(_string(tag, "value")),
            "json_schema": self._json,
            "any_text": self._free,
            "sequence": self._sequence,
            "or": lambda tag, last: (
                self._rule([self._form(each, is_last=last) for each in _list(tag, "elements")]),
            ),
            **dict.fromkeys(("optional", "star", "plus", "repeat"), self._repeated),
            "tag": lambda tag, last: self._tag(tag, is_last=last),
            "triggered_tags": lambda tag, _: (self._triggered(tag),),
            "tags_with_separator": lambda tag, _: self._separated(tag),
            "token": lambda tag, _: (self._token(_field(tag, "token")),),
            "exclude_token": lambda tag, _: (self._excluded(tag),),
            "any_tokens": lambda tag, _: (
                Repeated(self._rule([(self._excluded(tag),)]), 0, tag.get("max_tokens")),
            ),
            "token_triggered_tags": lambda tag, _: (self._token_triggered(tag),),
            "dispatch": lambda tag, _: (self._triggered(_as_triggered(tag)),),
            "token_dispatch": lambda tag, _: (self._token_triggered(_as_triggered(tag)),),
            "grammar": lambda tag, _: (write_gbnf(_string(tag, "grammar"), self._writer),),
        }

    def write(self, tag: Any) -> str:
        """Writes a tag and returns its rule.

        Raises:
            InvalidArgument: it is malformed, too large or cannot be enforced.
        """
        if isinstance(tag, dict) and tag.get("type") == "structural_tag":
            tag = tag.get("format")
        self._by_character = _has_gbnf(tag)
        return self._rule([self._form(tag, is_last=True)])

    def _rule(self, options: Iterable[Sequence[Symbol]]) -> str:
        return self._writer.add(self._writer.new_rule("g"), options)

    def _terminal(self, rx: Rx) -> Sequence[Symbol]:
        if self._by_character:
            # A terminal next to GBNF could read on into it.
            return write_characters(rx, self._writer)
        return () if rx == EMPTY else (self._writer.terminal(terminal(rx)),)

    def _form(self, tag: Any, *, is_last: bool) -> Sequence[Symbol]:
        """Returns the symbols of a part; `is_last` says that nothing follows it."""
        if not isinstance(tag, dict):
            raise refusal(f"structural_tag has {shown(tag)} where a format belongs: an object with a type")
        self._count += 1
        if self._count > MAX_TAGS:
            raise refusal(f"structural_tag has more than {MAX_TAGS} parts")
        _check_fields(tag)
        if (rx := self._regular(tag)) is not None:
            return self._terminal(rx)
        return self._writers[tag["type"]](tag, is_last)

    def _json(self, tag: dict[str, Any], is_last: bool) -> Sequence[Symbol]:  # noqa: ARG002
        schemas, marks = Schemas(_field(tag, "json_schema")), Marks(self._text, self._plain)
        return (notation(tag.get("style"), schemas, self._writer, marks).write(),)

    def _free(self, tag: dict[str, Any], is_last: bool) -> Sequence[Symbol]:
        if not is_last:
            raise refusal("structural_tag has an any_text before another part; put it into a tag with an end")
        return self._terminal(_without(_strings(tag, "excludes"), _free_text(tag)))

    def _regular(self, tag: Any) -> Rx | None:
        """Returns a part as an expression, if it is a text without special tokens, or an expression."""
        if not isinstance(tag, dict):
            return None
        if tag.get("type") == "regex":
            _check_fields(tag)
            pattern = _string(tag, "pattern")
            try:
                return parse_whole(pattern)
            except ValueError as error:
                raise refusal(f"the pattern {shown(pattern, width=60)} {error}") from None
        if tag.get("type") == "const_string":
            _check_fields(tag)
            text = _string(tag, "value")
            return None if self._special.search(text) else literal(text)
        return None

    def _sequence(self, tag: dict[str, Any], is_last: bool) -> Sequence[Symbol]:
        parts = _list(tag, "elements")
        symbols: list[Symbol] = []
        regular: list[Rx] = []
        for index, part in enumerate(parts):
            rx = self._regular(part)
            if rx is not None:
                regular.append(rx)
                continue
            symbols += self._joined(regular)
            symbols += self._form(part, is_last=is_last and index == len(parts) - 1)
            if (
                isinstance(part, dict)
                and part.get("type") == "optional"
                and isinstance(part["content"], dict)
                and "begin" in part["content"]
            ):
                self._optional_begin = part["content"]["begin"]
        return (*symbols, *self._joined(regular))

    def _joined(self, regular: list[Rx]) -> Sequence[Symbol]:
        parts = tuple(regular)
        regular.clear()
        return self._terminal(Joined(parts)) if parts else ()

    def _repeated(self, tag: dict[str, Any], is_last: bool) -> Sequence[Symbol]:  # noqa: ARG002
        least, most = {"optional": (0, 1), "star": (0, None), "plus": (1, None)}.get(
            tag["type"], (tag.get("min", 0), tag.get("max"))
        )
        if most == -1:
            most = None
        if (
            type(least) is not int
            or not (most is None or type(most) is int)
            or not 0 <= least <= 1000
            or (most is not None and not least <= most <= MAX_EXPANDED)
        ):
            raise refusal(
                "structural_tag has a repeat whose min is not a whole number from 0 to 1000, "
                f"or whose max is not one from min to {MAX_EXPANDED}"
            )
        return (Repeated(self._rule([self._form(_field(tag, "content"), is_last=False)]), least, most),)

    # -- texts and tokens

    def _text(self, text: str, following: Rx = EMPTY) -> tuple[Symbol, ...]:
        """Returns the symbols of a text, in which special tokens may be used or spelled."""
        symbols: list[Symbol] = []
        at = 0
        for found in self._special.finditer(text):
            symbols += self._terminal(literal(text[at : found.start()]))
            token = f"<[{self._specials[found.group()]}]>"
            symbols.append(self._rule([self._terminal(literal(found.group())), (token,)]))
            at = found.end()
        end = literal(text[at:])
        return (*symbols, *self._terminal(end if following == EMPTY else Joined((end, following))))

    def _plain(self, rx: Rx, mark: str, never: str) -> tuple[Symbol, ...]:
        """Returns the symbols of a text of `rx` without `never`, and the mark after it."""
        key = rx, mark
        if key not in self._plain_rules:
            self._plain_rules[key] = self._until([mark], [never], {mark: [()]}, rx)
        return (self._plain_rules[key],)

    def _edge(self, value: Any) -> Sequence[Symbol]:
        if isinstance(value, dict) and value.get("type") == "token":
            return (self._token(_field(value, "token")),)
        if not isinstance(value, str):
            raise refusal(f"structural_tag has {shown(value)} where a text or a token belongs")
        return self._text(value)

    def _id(self, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise refusal(f"structural_tag names the token {shown(value)}; give its text or its id")
        return self._id_of(value) if isinstance(value, str) else value

    def _token(self, value: Any) -> str:
        return f"<[{self._id(value)}]>"

    def _excluded(self, tag: dict[str, Any]) -> str:
        names = tag.get("exclude_tokens") or []
        if not isinstance(names, list):
            raise refusal("structural_tag has exclude_tokens that are not a list")
        ids = {*(self._id(each) for each in names), *self._hidden}
        return f"<[^{','.join(map(str, sorted(ids)))}]>" if ids else "<[*]>"

    # -- tags

    def _tag(self, tag: Any, *, is_last: bool, begun: str = "") -> Sequence[Symbol]:
        """Returns the symbols of a tag, of whose begin a text was written already."""
        if not isinstance(tag, dict) or tag.get("type", "tag") != "tag":
            raise refusal(f"structural_tag has {shown(tag)} where a tag belongs")
        _check_fields({"type": "tag", **tag})
        begin = tag.get("begin", "")
        start = self._edge(begin[len(begun) :] if isinstance(begin, str) else begin)
        end = tag.get("end", "")
        ends = end if isinstance(end, list) else [end]
        content = _field(tag, "content")
        options = [self._ended(content, each, is_last=is_last) for each in ends]
        return (*start, *(options[0] if len(options) == 1 else (self._rule(options),)))

    def _ended(self, content: Any, end: Any, *, is_last: bool) -> Sequence[Symbol]:
        free = isinstance(content, dict) and content.get("type") == "any_text"
        if not end:
            return self._form(content, is_last=is_last)
        if not isinstance(end, str):
            return (*self._form(content, is_last=free), *self._edge(end))
        if free:
            self._count += 1
            _check_fields(content)
            return (self._until([end], _strings(content, "excludes"), {end: [()]}, _free_text(content)),)
        rx = self._regular(content)
        if rx is None or self._special.search(end):
            return (*self._form(content, is_last=False), *self._text(end))
        return self._terminal(Joined((rx, literal(end))))

    def _until(
        self, marks: Sequence[str], excludes: Sequence[str],
        rests: Mapping[str, Sequence[Sequence[Symbol]]], free: Rx = ANY,
    ) -> str:  # fmt: skip
        """Returns a rule for free text up to the first of some marks, and whatever follows that mark."""
        options: list[Sequence[Symbol]] = []
        any_mark = AnyOf(tuple(map(literal, marks)))
        for mark in marks:
            text = _without([each for each in excludes if each not in marks], free)
            spelled = AllOf((
                Joined((text, literal(mark))), Not(Joined((ANY, any_mark, _SOME))),
            ))  # fmt: skip
            starts: list[Sequence[Symbol]] = [self._terminal(spelled)]
            if found := self._special.search(mark):
                before = AllOf((
                    Joined((free, literal(mark[: found.start()]))), _without([*marks, *excludes]),
                ))  # fmt: skip
                token = f"<[{self._specials[found.group()]}]>"
                starts.append((*self._terminal(before), token, *self._text(mark[found.end() :])))
            start = starts[0] if len(starts) == 1 else (self._rule(starts),)
            options += [(*start, *rest) for rest in rests[mark]]
        return self._rule(options)

    def _triggered(self, tag: dict[str, Any]) -> str:
        triggers, tags = _strings(tag, "triggers"), _list(tag, "tags")
        excludes = _strings(tag, "excludes")
        rests: dict[str, list[Sequence[Symbol]]] = {trigger: [] for trigger in triggers}
        for each in tags:
            begin = each.get("begin") if isinstance(each, dict) else None
            found = [trigger for trigger in triggers if isinstance(begin, str) and begin.startswith(trigger)]
            if len(found) != 1:
                raise refusal(
                    f"structural_tag's begin {shown(begin)} must start with exactly one of its triggers"
                )
            rests[found[0]].append(self._tag(each, is_last=False, begun=found[0]))
        free: Rx = ANY
        if isinstance(self._optional_begin, str) and self._optional_begin:
            free = AllOf((ANY, Not(Joined((literal(self._optional_begin), ANY)))))
        call = self._until([trigger for trigger in triggers if rests[trigger]], excludes, rests, free)
        tail = self._terminal(_without([*triggers, *excludes], free))
        return self._calls(tag, [(call,)], [tail])

    def _calls(
        self, tag: dict[str, Any], calls: list[Sequence[Symbol]], tails: list[Sequence[Symbol]]
    ) -> str:
        """Returns a rule for free text with calls in it."""
        stop, needed = bool(tag.get("stop_after_first")), bool(tag.get("at_least_one"))
        rest = self._rule([])
        following: Sequence[Symbol] = () if stop else (rest,)
        self._writer.add(rest, [*tails, *((*call, *following) for call in calls)])
        if not needed:
            return rest
        first = [self._tag(each, is_last=False) for each in _list(tag, "tags")]
        return self._rule([(*each, *following) for each in first])

    def _token_triggered(self, tag: dict[str, Any]) -> str:
        triggers = {self._id(each) for each in _list(tag, "trigger_tokens")}
        names = tag.get("exclude_tokens") or []
        free = Repeated(
            self._rule([(self._excluded({"exclude_tokens": [*names, *sorted(triggers)]}),)]), 0, None
        )
        tags = [self._tag(each, is_last=False) for each in _list(tag, "tags")]
        return self._calls(tag, [(free, *each) for each in tags], [(free,)])

    def _separated(self, tag: dict[str, Any]) -> Sequence[Symbol]:
        each = self._rule([self._tag(each, is_last=False) for each in _list(tag, "tags")])
        separator = tag.get("separator", "")
        if not isinstance(separator, str):
            raise refusal("structural_tag has a separator that is not a text")
        following = self._rule([(*self._text(separator), each)])
        several: list[Symbol] = [each]
        if not tag.get("stop_after_first"):
            several.append(Repeated(following, 0, None))
        return several if tag.get("at_least_one") else (self._rule([several, ()]),)


def _has_gbnf(tag: Any) -> bool:
    if isinstance(tag, list):
        return any(map(_has_gbnf, tag))
    if not isinstance(tag, dict):
        return False
    return tag.get("type") == "grammar" or any(
        _has_gbnf(value) for name, value in tag.items() if name != "json_schema"
    )


def _as_triggered(tag: dict[str, Any]) -> dict[str, Any]:
    """Returns a dispatch in the form of triggered tags, of which it is a short form."""
    rules = _list(tag, "rules")
    if not all(isinstance(rule, list) and len(rule) == 2 for rule in rules):
        raise refusal("structural_tag has rules that are not pairs of a pattern and a format")
    by_token = tag["type"] == "token_dispatch"
    tags = [
        {"begin": {"type": "token", "token": begin} if by_token else begin, "content": content}
        for begin, content in rules
    ]
    begins = [begin for begin, _ in rules]
    names = {"trigger_tokens": begins} if by_token else {"triggers": begins}
    return {**tag, **names, "tags": tags, "stop_after_first": tag.get("loop") is False}


def _free_text(tag: dict[str, Any]) -> Rx:
    return Repeat(Chars(ALL), 0, tag.get("max_chars"))


def _without(excludes: Sequence[str], free: Rx = ANY) -> Rx:
    """Returns an expression for texts of `free` without some texts."""
    parts = tuple(Not(Joined((ANY, literal(each), ANY))) for each in dict.fromkeys(excludes) if each)
    return AllOf((free, *parts)) if parts else free


def _field(tag: dict[str, Any], name: str) -> Any:
    if name not in tag:
        raise refusal(f"structural_tag has a part of type {shown(tag.get('type'))} without {name}")
    return tag[name]


def _string(tag: dict[str, Any], name: str) -> str:
    value = _field(tag, name)
    if not isinstance(value, str):
        raise refusal(f"structural_tag has a {name} that is not a text")
    return value


def _list(tag: dict[str, Any], name: str) -> list[Any]:
    value = _field(tag, name)
    if not isinstance(value, list) or not value:
        raise refusal(f"structural_tag has {name} that are not a list of at least one part")
    return value


def _strings(tag: dict[str, Any], name: str) -> list[str]:
    value = tag.get(name) or []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise refusal(f"structural_tag has {name} that are not a list of texts")
    return value
