"""Finds the schemas of a document and resolves references between them. Nothing is ever fetched."""

from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote, urldefrag, urljoin

from worker_svc.grammars.limits import refuse_schema, shown

# Keywords with a schema, with a list of schemas, and with a schema per name.
_SCHEMA: Final = frozenset({
    "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
})  # fmt: skip
_LISTS: Final = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_MAPS: Final = frozenset({
    "$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties",
})  # fmt: skip
_REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")
_ROOT: Final = "schema:/"
_MAX_SCHEMAS: Final = 4000


class Documents:
    """The schema resources of a document, by URI (2020-12, section 8)."""

    def __init__(self, root: Any) -> None:
        self._bases: dict[int, str] = {}
        self._places: dict[int, str] = {}
        self._resources: dict[str, Any] = {}
        self._anchors: dict[tuple[str, str], Any] = {}
        self._dynamic: dict[tuple[str, str], Any] = {}
        self._nodes: list[Mapping[str, Any]] = []
        self._index(root, _ROOT, "$")
        self._resources.setdefault(_ROOT, root)
        # A definition that nothing uses may have one, too.
        for node in self._nodes:
            for reference in filter(None, map(node.get, _REFERENCES)):
                self._resource(reference, node)

    def base(self, node: Mapping[str, Any]) -> str:
        """Returns the URI of a schema's resource."""
        return self._bases[id(node)]

    def place(self, node: Any) -> str:
        """Returns the path of a schema, for errors."""
        return self._places.get(id(node), "$")

    def resolve(self, reference: Any, node: Mapping[str, Any]) -> Any:
        """Returns the schema named by a `$ref` in `node`; refuses one outside the document."""
        uri, fragment = self._resource(reference, node)
        if not fragment:
            return self._resources[uri]
        if not fragment.startswith("/"):
            found = self._anchors.get((uri, unquote(fragment)))
        else:
            found = self._point(uri, fragment)
        if found is None:
            refuse_schema(self.place(node), f"has the $ref {shown(reference)}, which leads nowhere")
        return found

    def _resource(self, reference: Any, node: Mapping[str, Any]) -> tuple[str, str]:
        """Returns the URI of a reference's resource, and its fragment."""
        where, base = self.place(node), self.base(node)
        if not isinstance(reference, str):
            refuse_schema(where, f"has the $ref {shown(reference)}, which is not a text")
        uri, fragment = urldefrag(
            base + reference if reference.startswith("#") else _join(base, reference, where)
        )
        if uri not in self._resources:
            refuse_schema(
                where,
                f"has the $ref {shown(reference)}, which is not part of the schema; references are never fetched,"
                " so put the definition under $defs",
            )
        return uri, fragment

    def resolve_dynamic(self, reference: Any, node: Mapping[str, Any], scope: tuple[str, ...]) -> Any:
        """Returns the schema named by a `$dynamicRef` in `node`.

        `scope` are the URIs of the resources entered on the way to `node`, outermost first.
        """
        found = self.resolve(reference, node)
        anchor = urldefrag(reference).fragment
        if not isinstance(found, dict) or found.get("$dynamicAnchor") != anchor or not anchor:
            return found
        return next(
            (self._dynamic[uri, anchor] for uri in scope if (uri, anchor) in self._dynamic),
            found,
        )

    def _index(self, node: Any, base: str, place: str) -> None:
        pending = [(node, base, place)]
        while pending:
            node, base, place = pending.pop()
            if not isinstance(node, dict) or id(node) in self._bases:
                continue
            identifier = node.get("$id")
            if isinstance(identifier, str) and not identifier.startswith("#"):
                base = urldefrag(_join(base, identifier, place)).url
                self._resources.setdefault(base, node)
            self._bases[id(node)], self._places[id(node)] = base, place
            self._nodes.append(node)
            if len(self._bases) > _MAX_SCHEMAS:
                refuse_schema("$", "exceeds the limit on subschemas; describe less of the output")
            # Programs write null for a keyword that is not set.
            for keyword in [name for name, value in node.items() if value is None and name != "const"]:
                del node[keyword]
            for keyword, found in (("$anchor", self._anchors), ("$dynamicAnchor", self._dynamic)):
                if isinstance(anchor := node.get(keyword), str):
                    found.setdefault((base, anchor), node)
                    self._anchors.setdefault((base, anchor), node)
            pending += [(each, base, f"{place}{step}") for step, each in _children(node)]

    def _point(self, uri: str, pointer: str) -> Any:
        """Follows a JSON pointer (RFC 6901); `None` if it leads nowhere."""
        node, base, place = self._resources[uri], uri, "#"
        for part in pointer.split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            place += f"/{name}"
            if isinstance(node, dict) and id(node) in self._bases:
                base = self._bases[id(node)]
            if isinstance(node, list) and name.isascii() and name.isdecimal() and len(name) < 10:
                node = node[int(name)] if int(name) < len(node) else None
            else:
                node = node.get(name) if isinstance(node, dict) else None
        if not isinstance(node, dict | bool):
            return None
        self._index(node, base, place)
        return node


def _join(base: str, reference: str, where: str) -> str:
    try:
        return urljoin(base, reference)
    except ValueError:
        refuse_schema(where, f"has {shown(reference)}, which is not a URI")


def _children(node: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the schemas directly inside a schema, with the step of the path to it."""
    for keyword, value in node.items():
        if keyword in _SCHEMA and isinstance(value, dict):
            yield f".{keyword}", value
        elif keyword in _LISTS and isinstance(value, list):
            for index, each in enumerate(value):
                yield f".{keyword}[{index}]", each
        elif keyword in _MAPS and isinstance(value, dict):
            for name, each in value.items():
                yield (f".{name}" if keyword == "properties" else f".{keyword}.{name}"), each
