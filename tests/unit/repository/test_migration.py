"""docs/migration.md and the tables that the code uses."""

import pytest

from deploy.vllm_flags.rbln import RBLN
from deploy.vllm_flags.table import FLAGS
from protos.environment.table import VARIABLES
from tests.support.docs.migration import PAGE, migration


def test_the_page_has_the_tables_of_the_code() -> None:
    """`make docs` would change nothing."""
    assert PAGE.read_text() == migration()


@pytest.mark.parametrize("names", [[flag.name for flag in (*FLAGS, *RBLN)], list(VARIABLES)])
def test_the_page_names_everything_once(names: list[str]) -> None:
    """Every flag and every variable is the first word of a row's line."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    cells = "<br>".join(row.split("|")[1] for row in rows).replace(", ", "<br>").split("<br>")
    found = [cell.strip(" `") for cell in cells]
    assert {name: found.count(name) for name in names} == dict.fromkeys(names, 1)
