"""Compares what the ranks of a replica say of themselves."""

from collections.abc import Mapping, Sequence

from protos.errors import ConfigurationRefused


def refuse_differences(facts: Sequence[Mapping[str, str]]) -> None:
    """Checks that all ranks have the facts of rank 0; all ranks find the same difference.

    Args:
        facts: by rank, what must be alike.

    Raises:
        ConfigurationRefused: names the first difference and the ranks that have it.
    """
    for key in sorted(set().union(*facts)):
        values = [each.get(key, "none") for each in facts]
        other = next((value for value in values if value != values[0]), None)
        if other is None:
            continue
        having, differing = (_ranks(values, value) for value in (values[0], other))
        raise ConfigurationRefused(
            f"{having} of the replica {_verb(having)} {key} {values[0]} and {differing} {_verb(differing)} {other};"
            " start all ranks with the same flags, packages and kind of device"
        )


def _ranks(values: Sequence[str], value: str) -> str:
    ranks = [str(rank) for rank, each in enumerate(values) if each == value]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"


def _verb(ranks: str) -> str:
    return "have" if ranks.startswith("ranks") else "has"
