"""Compares the facts of a replica's ranks."""

from collections.abc import Mapping, Sequence

from protos.errors import ConfigurationRefused


def refuse_differences(facts: Sequence[Mapping[str, str]]) -> None:
    """Compares all ranks' facts with rank 0's; all ranks find the same difference.

    Args:
        facts: by rank, the facts that must agree.

    Raises:
        ConfigurationRefused: names the first difference and its ranks.
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
