"""Makes docs/api-grpc.md from the services, messages, fields and comments of protos/triptych/v1."""

import tempfile
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

from protos.generate import PACKAGE
from protos.generate import ROOT as PROTOS
from protos.triptych.v1 import inference_pb2, worker_pb2
from tests.support.docs.pages import NOTICE, anchor, page, table

INTRODUCTION = """\
# gRPC API

The package is `triptych.v1`. The files are in `protos/triptych/v1/`; the Python stubs that go with them are committed. Every service
also answers gRPC health checks (`grpc.health.v1`) and server reflection. A failed call carries an [`Error`](#error) as a detail of its
status.

A direct client of `triptych up` uses the Unix socket `run/scheduler.sock`, or the port of `--scheduler-port`, and sends the token in
`run/secure/service-token` as metadata, `authorization: Bearer TOKEN`; [examples/grpc_token_ids.py](../examples/grpc_token_ids.py) does.
A scheduler of its own listens on `--port` (50051) and asks for a token if it has one ([Security](security.md)).

Clients and gateways call `Inference` on the scheduler. The calls between scheduler and workers are in `registry.proto` and `worker.proto`.
"""

# The files of the calls between scheduler and workers.
_INTERNAL = ("registry.proto", "worker.proto")


# Field numbers of descriptor.proto; source information uses them to name the place of a comment.
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_FIELDS, _NESTED, _NESTED_ENUMS = 2, 3, 4
_METHODS, _VALUES = 2, 2
_SYNTAX = 12

# Imported so that the options of their fields are known when the descriptors are read.
_SCHEMA = (inference_pb2.DESCRIPTOR, worker_pb2.DESCRIPTOR)

Place = tuple[int, ...]


class File:
    """One .proto file with its comments."""

    def __init__(self, descriptor: FileDescriptorProto) -> None:
        """Reads the comments before each place, and those after it on the same line."""
        self.descriptor = descriptor
        self._comments = {
            tuple(place.path): place.leading_comments or place.trailing_comments
            for place in descriptor.source_code_info.location
        }

    def comment(self, *path: int) -> str:
        """Returns the comment at a place, on one line."""
        return " ".join(self._comments.get(path, "").split())

    def prose(self, *path: int) -> list[str]:
        """Returns the comment at a place as paragraphs and list items."""
        lines: list[str] = []
        for line in self._comments.get(path, "").splitlines():
            text = line.strip()
            if text.startswith("- ") and lines and not lines[-1].startswith("- "):
                lines.append("")
            if not text or text.startswith("- ") or not lines or not lines[-1]:
                lines.append(text)
            else:
                lines[-1] += f" {text}"
        return lines


def descriptors() -> list[File]:
    """Returns all files of the package, compiled with their source information.

    Raises:
        RuntimeError: The compiler refuses a file; it has printed why.
    """
    from grpc_tools import protoc

    include = resources.files("grpc_tools") / "_proto"
    files = [str(path.relative_to(PROTOS)) for path in sorted((PROTOS / PACKAGE).glob("*.proto"))]
    with tempfile.NamedTemporaryFile() as out:
        arguments = [
            "protoc",
            f"-I{PROTOS}",
            f"-I{include}",
            "--include_source_info",
            f"--descriptor_set_out={out.name}",
        ]
        if protoc.main([*arguments, *files]) != 0:
            raise RuntimeError("protoc failed")
        found = FileDescriptorSet.FromString(Path(out.name).read_bytes())
    return [File(file) for file in found.file]


def grpc_api() -> str:
    """Returns the whole page."""
    files = [file for file in descriptors() if not file.descriptor.name.endswith(_INTERNAL)]
    services = [
        line
        for file in files
        for index, service in enumerate(file.descriptor.service)
        for line in _service(file, index, service)
    ]
    needed = _reachable(files)
    messages = [line for file in files for line in _file(file, needed)]
    return page([NOTICE, "", *INTRODUCTION.splitlines(), ""], services, messages)


def _reachable(files: Sequence[File]) -> set[str]:
    """Returns the names of the types of all calls, and of their fields."""
    types = {name: item for file in files for _, name, item in _types(file.descriptor)}
    queue = [
        name.removeprefix(".triptych.v1.")
        for file in files
        for service in file.descriptor.service
        for method in service.method
        for name in (method.input_type, method.output_type)
    ]
    queue.append("Error")
    found = set[str]()
    while queue:
        name = queue.pop()
        found.add(name)
        if isinstance(item := types.get(name), DescriptorProto):
            entries = [field for entry in item.nested_type for field in entry.field]
            inner = {field.type_name.removeprefix(".triptych.v1.") for field in (*item.field, *entries)}
            queue += inner - found - {""}
    return found


def _service(file: File, index: int, service: ServiceDescriptorProto) -> list[str]:
    rows = []
    for number, method in enumerate(service.method):
        request = _link(method.input_type, streamed=method.client_streaming)
        answer = _link(method.output_type, streamed=method.server_streaming)
        rows.append((f"`{method.name}`", request, answer, file.comment(_SERVICES, index, _METHODS, number)))
    about = file.prose(_SERVICES, index) or file.prose(_SYNTAX)
    return [
        f"## Service {service.name}",
        "",
        *about,
        "",
        *table(("RPC", "request", "answer", "what it does"), rows),
    ]


def _link(type_name: str, *, streamed: bool = False) -> str:
    name = type_name.removeprefix(".triptych.v1.")
    return f"{'stream of ' if streamed else ''}[{name}](#{anchor(name)})"


def _file(file: File, needed: set[str]) -> list[str]:
    name = Path(file.descriptor.name).name
    about = [] if file.descriptor.service else [*file.prose(_SYNTAX), ""]
    lines = [f"## Messages of {name}", "", *about]
    for path, qualified, item in _types(file.descriptor):
        if qualified not in needed:
            continue
        lines += [f"### {qualified}", ""]
        if comment := file.prose(*path):
            lines += [*comment, ""]
        if isinstance(item, DescriptorProto):
            lines += _fields(file, path, item)
        else:
            rows = [
                (f"`{value.name}`", str(value.number), file.comment(*path, _VALUES, number))
                for number, value in enumerate(item.value)
            ]
            lines += table(("value", "number", "meaning"), rows)
    return lines


def _types(file: FileDescriptorProto) -> Iterator[tuple[Place, str, DescriptorProto | EnumDescriptorProto]]:
    for index, message in enumerate(file.message_type):
        yield (_MESSAGES, index), message.name, message
        yield from _nested((_MESSAGES, index), message.name, message)
    for index, enum in enumerate(file.enum_type):
        yield (_ENUMS, index), enum.name, enum


def _nested(
    path: Place, prefix: str, message: DescriptorProto
) -> Iterator[tuple[Place, str, DescriptorProto | EnumDescriptorProto]]:
    for index, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            yield (*path, _NESTED, index), f"{prefix}.{nested.name}", nested
    for index, enum in enumerate(message.enum_type):
        yield (*path, _NESTED_ENUMS, index), f"{prefix}.{enum.name}", enum


def _fields(file: File, path: Place, message: DescriptorProto) -> list[str]:
    if not message.field:
        return ["No fields.", ""]
    rows = [
        (
            f"`{field.name}`",
            str(field.number),
            _field_type(message, field),
            file.comment(*path, _FIELDS, index),
        )
        for index, field in enumerate(message.field)
    ]
    return table(("field", "number", "type", "meaning"), rows)


def _field_type(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    return ", ".join(text for text in (_type(message, field), _bounds(field)) if text)


def _type(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    entries = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    if entry := entries.get(field.type_name.rpartition(".")[2]):
        return f"map of {_single(entry.field[0])} to {_single(entry.field[1])}"
    text = _single(field)
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"list of {text}"
    if field.proto3_optional:
        return f"optional {text}"
    if field.HasField("oneof_index"):
        return f"{text}, one of `{message.oneof_decl[field.oneof_index].name}`"
    return text


def _bounds(field: FieldDescriptorProto) -> str:
    """Returns the limits in a field's options, in words."""
    limits = {
        inner.name: number
        for option, value in field.options.ListFields()
        if option.is_extension and option.message_type is not None
        for inner, number in value.ListFields()
    }
    low, high = limits.get("min"), limits.get("max")
    parts = []
    if low is not None and limits.get("above_min"):
        parts.append(f"above {low:,g}" + ("" if high is None else f", at most {high:,g}"))
    elif low is not None:
        parts.append(f"at least {low:,g}" if high is None else f"{low:,g} to {high:,g}")
    elif high is not None:
        parts.append(f"at most {high:,g}")
    least, most = limits.get("min_items"), limits.get("max_items")
    if least and most:
        parts.append(f"{least:,} to {most:,} items")
    elif least:
        parts.append("not empty" if least == 1 else f"at least {least:,} items")
    elif most:
        parts.append(f"at most {most:,} items")
    if longest := limits.get("max_bytes"):
        parts.append(f"at most {longest:,} bytes")
    return ", ".join(parts)


def _single(field: FieldDescriptorProto) -> str:
    if field.type_name:
        return _link(field.type_name)
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
