"""What follows when a child process dies: how people read about it, and how long its restart waits."""

from dataclasses import dataclass

from deploy.launcher.log_tail import last_lines
from deploy.launcher.process import ChildSpec, describe_exit

BAD_SETTING = 2
"""The exit code of a service that refuses its settings. A restart would not help."""


@dataclass(frozen=True)
class RestartPolicy:
    """How long a dead child waits for its restart, and when the launcher gives up."""

    first_delay_s: float = 0.5
    """Delay after the first death."""
    longest_delay_s: float = 30.0
    """Each consecutive death doubles the delay, up to this limit."""
    forgive_after_s: float = 60.0
    """The count of deaths restarts after a child ran this long."""
    failed_starts: int = 3
    """Consecutive deaths of one child after which the launcher gives up, unless it has already served."""

    def delay_s(self, deaths: int) -> float:
        """Returns the seconds to wait after `deaths` consecutive deaths."""
        return float(min(self.first_delay_s * 2 ** (deaths - 1), self.longest_delay_s))


def describe_death(spec: ChildSpec, status: int) -> str:
    """Returns what people need to know of a death: the exit and, if there is a log, its last lines."""
    place = f" Its log: {spec.log}" if spec.has_log else ""
    lines = [f"{spec.name} died ({describe_exit(status)}).{place}"]
    return "\n".join(lines + [f"  | {line}" for line in last_lines(spec.log, 5)])
