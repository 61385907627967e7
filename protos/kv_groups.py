"""Kinds of KV groups, as the scheduler and the worker both use them."""

import enum

from protos.triptych.v1 import common_pb2


class GroupKind(enum.Enum):
    """How a group of layers uses KV memory."""

    FULL = "full"
    """Every token is kept, in paged blocks."""
    PAGED_WINDOW = "paged_window"
    """Append-only paged blocks; blocks before the window may be freed."""
    IN_PLACE_WINDOW = "in_place_window"
    """A block per request with the tokens of a window, oldest first, which slide with every step."""


_TO_PROTO = {
    GroupKind.FULL: common_pb2.KV_GROUP_KIND_FULL,
    GroupKind.PAGED_WINDOW: common_pb2.KV_GROUP_KIND_PAGED_WINDOW,
    GroupKind.IN_PLACE_WINDOW: common_pb2.KV_GROUP_KIND_IN_PLACE_WINDOW,
}
_FROM_PROTO = {value: kind for kind, value in _TO_PROTO.items()}


def kind_to_proto(kind: GroupKind) -> common_pb2.KvGroupKind.ValueType:
    """Returns a kind's value in messages."""
    return _TO_PROTO[kind]


def kind_from_proto(value: common_pb2.KvGroupKind.ValueType) -> GroupKind | None:
    """Returns the kind of a message's value; None if this release does not know it."""
    return _FROM_PROTO.get(value)
