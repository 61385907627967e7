"""Calls written as a name and nested elements named after the parameters.

::

    f">
    ]<]minimax[>[<city>Paris]<]minimax[>[</city>
    ]<]minimax[>[<days>]<]minimax[>[<item>1]<]minimax[>[</item>]<]minimax[>[</days>

Source: the chat template of MiniMax M3. A call is emitted whole, because elements of the same
name are a list.
"""

from dataclasses import dataclass, field
from typing import Final, TypeAlias

from gateway.parsers.call_reader import MAX_NAME, CallContext, CallReader, Marker
from gateway.parsers.events import Event
from gateway.parsers.formats import Elements
from gateway.parsers.json_scan import MAX_DEPTH
from gateway.parsers.parser_base import split_at
from gateway.parsers.values import Schema, as_json, item_schema, property_schema, quoted, types

_ITEM: Final = "item"
# Name of the text between the children of an element, as in vLLM.
_MIXED: Final = "$text"

# An element's contents: its text, or its children with their names.
_Contents: TypeAlias = "str | list[tuple[str, _Contents]]"


@dataclass(slots=True)
class _Element:
    """An element that is still open."""

    name: str
    text: list[str] = field(default_factory=list)
    children: list[tuple[str, _Contents]] = field(default_factory=list)

    def contents(self) -> _Contents:
        text = "".join(self.text)
        if not self.children:
            return text
        return [*self.children, (_MIXED, text)] if text.strip() else self.children


class ElementsCall(CallReader):
    """Reads a call and writes its arguments as JSON; see :class:`CallReader`."""

    def __init__(self, form: Elements, context: CallContext) -> None:
        """Waits for the call; see :class:`CallContext`."""
        super().__init__(context, self._name)
        self._name_end, self._prefix = Marker(form.name_end), form.prefix
        # The call itself, and the elements that are open in it.
        self._open = [_Element("")]

    def _name(self, _: list[Event]) -> bool:
        if not self._skip():
            return False
        if not (name := self._name_ahead()):
            return False
        after = self._name_end.match(self._rest, len(name))
        if after is None:
            return False
        if after < 0:
            return self._fail()
        self._take(after)
        self._open[0].name = name
        self._state = self._contents
        return True

    def _contents(self, _: list[Event]) -> bool:
        """Reads text up to the next tag."""
        text, prefix, _rest = split_at(self._rest, (self._prefix,))
        if len(self._open) == 1 and text.strip():
            return self._fail()
        self._open[-1].text.append(self._take(len(text)))
        if prefix:
            self._state = self._tag
        return bool(prefix)

    def _tag(self, out: list[Event]) -> bool:
        """Reads a tag, with the prefix before it; the tag that ends the call is left."""
        start, end_start = f"{self._prefix}<", f"{self._prefix}</"
        if end_start.startswith(self._rest) and self._rest != end_start:
            return False
        if self._rest.startswith(end_start) and len(self._open) == 1:
            self._call(out)
            return False
        at = self._rest.find(">", len(start))
        if not self._rest.startswith(start) or (at if at >= 0 else len(self._rest)) > MAX_NAME:
            return self._fail()
        if at < 0:
            return False
        name = self._rest[len(start) : at]
        if name == f"/{self._open[-1].name}":
            element = self._open.pop()
            self._open[-1].children.append((element.name, element.contents()))
        elif name.startswith("/") or not name.strip() or len(self._open) > MAX_DEPTH:
            return self._fail()
        else:
            self._open.append(_Element(name))
        self._take(at + 1)
        self._state = self._contents
        return True

    def _call(self, out: list[Event]) -> None:
        call = self._open[0]
        root = self._schema(call.name)
        self._announce(call.name, out)
        self._emit(_object(call.children, root, root), out)
        self.done = True

    def finish(self, out: list[Event]) -> None:
        """Handles the end of the text: a call may lack its last tag, or a part of it."""
        is_named = self._state != self._name
        if is_named and len(self._open) == 1 and f"{self._prefix}<".startswith(self._rest):
            self._call(out)
        super().finish(out)


def _value(contents: _Contents, schema: Schema, root: Schema) -> str:
    """Returns an element's contents as JSON."""
    allowed = types(schema, root)
    if isinstance(contents, str):
        if not contents.strip() and "string" not in allowed:
            # The template writes empty lists and objects so.
            return "[]" if "array" in allowed else "{}" if "object" in allowed else as_json(contents, allowed)
        return as_json(contents, allowed)
    if "array" in allowed and ("object" not in allowed or all(name == _ITEM for name, _ in contents)):
        items = item_schema(schema, root)
        return f"[{', '.join(_value(inner, items, root) for _, inner in contents)}]"
    return _object(contents, schema, root)


def _object(children: list[tuple[str, _Contents]], schema: Schema, root: Schema) -> str:
    """Returns elements as a JSON object; several of the same name are a list."""
    members: dict[str, list[str]] = {}
    for name, contents in children:
        value = _value(contents, property_schema(schema, name, root), root)
        members.setdefault(name, []).append(value)
    texts = (
        f"{quoted(name)}: {values[0] if len(values) == 1 else '[' + ', '.join(values) + ']'}"
        for name, values in members.items()
    )
    return f"{{{', '.join(texts)}}}"
