"""Draws the rooms and their arrows in docs/architecture.md from the imports."""

import ast
import functools
from collections import defaultdict

import grimp

from tests.support.docs.pages import table, with_region
from tests.support.paths import ROOT

SERVICES = ("gateway", "scheduler_svc", "worker_svc", "deploy")
SHARED = "protos"
PAGE = ROOT / "docs" / "architecture.md"

Arrows = dict[str, set[str]]


def room_of(module: str) -> str:
    """Returns a module's room: its folder in the service, or the module itself if it is in no folder."""
    return ".".join(module.split(".")[:2])


@functools.cache
def import_graph() -> grimp.ImportGraph:
    """Returns every first-party import, including those under `TYPE_CHECKING`."""
    return grimp.build_graph(*SERVICES, SHARED, cache_dir=None)


def arrows(service: str) -> Arrows:
    """Returns the rooms that each room of a service imports from the same service."""
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
    """Returns the graph without arrows that a longer path implies."""
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
    """Returns every room that a path from `room` reaches."""
    found: set[str] = set()
    queue = [room]
    while queue:
        fresh = graph.get(queue.pop(), set()) - found
        found |= fresh
        queue += fresh
    return found


def mermaid(service: str) -> list[str]:
    """Returns one service's rooms as a Mermaid flowchart."""
    graph = without_shortcuts(arrows(service))
    names = sorted(graph)
    keys = {room: room.replace(".", "_") for room in names}
    lines = ["```mermaid", "flowchart TD"]
    for room in names:
        label = room.partition(".")[2]
        lines.append(
            f'    {keys[room]}["{label}/"]' if is_folder(room) else f'    {keys[room]}(["{label}.py"])'
        )
    lines += [f"    {keys[room]} --> {keys[target]}" for room in names for target in sorted(graph[room])]
    return [*lines, "```"]


def rooms_of(service: str) -> list[str]:
    """Returns each room with the first sentence of its docstring and its number of files."""
    modules = import_graph().modules
    rows = []
    for room in sorted(room for room in arrows(service) if is_folder(room)):
        folder = room.replace(".", "/")
        text = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text())) or ""
        files = sum(1 for module in modules if module.startswith(f"{room}."))
        rows.append((f"`{folder}`", text.partition("\n\n")[0].replace("``", "`"), str(files)))
    return table(("room", "what lives there", "files"), rows)


def is_folder(room: str) -> bool:
    """Whether a room is a folder, not a file beside the rooms."""
    return (ROOT / room.replace(".", "/")).is_dir()


def between_services() -> list[str]:
    """Returns the imports between the packages as a Mermaid flowchart."""
    graph = import_graph()
    found = sorted(
        {
            (source, target)
            for module in graph.modules
            for imported in graph.find_modules_directly_imported_by(module)
            if (source := module.partition(".")[0]) != (target := imported.partition(".")[0])
        }
    )
    return ["```mermaid", "flowchart TD", *(f"    {source} --> {target}" for source, target in found), "```"]


def diagrams() -> str:
    """Returns the region of the page."""
    parts = [*between_services(), ""]
    for service in SERVICES:
        parts += [f"### Rooms of {service}", "", *mermaid(service), "", *rooms_of(service)]
    return "\n".join(parts)


def decisions() -> str:
    """Returns a list of the design decisions, by number."""
    pages = sorted((ROOT / "docs" / "adr").glob("*.md"))
    titles = [(page, page.read_text().partition("\n")[0].removeprefix("# ")) for page in pages]
    return "\n".join(f"- [{title}](adr/{page.name})" for page, title in titles)


def architecture() -> str:
    """Returns the page with new regions."""
    page = with_region(PAGE.read_text(), "rooms", diagrams())
    return with_region(page, "decisions", decisions())
