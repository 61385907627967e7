"""The rooms and their arrows in docs/architecture.md, drawn from the imports."""

import functools
from collections import defaultdict

import grimp

from tests.support.docs.pages import with_region
from tests.support.paths import ROOT

SERVICES = ("gateway", "scheduler_svc", "worker_svc", "deploy")
SHARED = "protos"
PAGE = ROOT / "docs" / "architecture.md"

Arrows = dict[str, set[str]]


def room_of(module: str) -> str:
    """The room of a module: its folder inside the service, or the module itself where it lies beside the rooms."""
    return ".".join(module.split(".")[:2])


@functools.cache
def import_graph() -> grimp.ImportGraph:
    """Every first-party import, those under `TYPE_CHECKING` included."""
    return grimp.build_graph(*SERVICES, SHARED, cache_dir=None)


def arrows(service: str) -> Arrows:
    """Each room of a service to the rooms of the same service that it imports."""
    found: Arrows = defaultdict(set)
    graph = import_graph()
    for module in graph.modules:
        if module.partition(".")[0] != service or module == service:
            continue
        source = room_of(module)
        found[source] |= {
            room_of(imported)
            for imported in graph.find_modules_directly_imported_by(module)
            if imported.partition(".")[0] == service and imported != service
        } - {source}
    return dict(found)


def without_shortcuts(graph: Arrows) -> Arrows:
    """The same without arrows that a longer way says already."""
    below = {room: _below(graph, room) for room in graph}
    return {
        room: {
            target
            for target in targets
            if not any(target in below[other] and other not in below[target] for other in targets - {target})
        }
        for room, targets in graph.items()
    }


def _below(graph: Arrows, room: str) -> set[str]:
    """Every room that a way leads to from `room`."""
    found: set[str] = set()
    queue = [room]
    while queue:
        fresh = graph.get(queue.pop(), set()) - found
        found |= fresh
        queue += fresh
    return found


def mermaid(service: str) -> list[str]:
    """One service's rooms as a Mermaid flowchart."""
    graph = without_shortcuts(arrows(service))
    names = sorted(graph)
    keys = {room: room.replace(".", "_") for room in names}
    lines = ["```mermaid", "flowchart TD"]
    for room in names:
        label = room.partition(".")[2]
        is_folder = (ROOT / room.replace(".", "/")).is_dir()
        lines.append(f'    {keys[room]}["{label}/"]' if is_folder else f'    {keys[room]}(["{label}.py"])')
    lines += [f"    {keys[room]} --> {keys[target]}" for room in names for target in sorted(graph[room])]
    return [*lines, "```"]


def table_of_rooms() -> list[str]:
    """How many files and arrows each service has."""
    graph = import_graph()
    lines = ["| service | rooms | arrows between rooms | files |", "| --- | --- | --- | --- |"]
    for service in SERVICES:
        found = arrows(service)
        rooms = sum(1 for room in found if (ROOT / room.replace(".", "/")).is_dir())
        files = sum(1 for module in graph.modules if module.partition(".")[0] == service)
        lines.append(f"| `{service}` | {rooms} | {sum(map(len, found.values()))} | {files} |")
    return lines


def diagrams() -> str:
    """The region of the page."""
    parts = [*table_of_rooms(), ""]
    for service in SERVICES:
        parts += [f"**`{service}`**", "", *mermaid(service), ""]
    return "\n".join(parts)


def architecture() -> str:
    """The page with its region made anew."""
    return with_region(PAGE.read_text(), "rooms", diagrams())
