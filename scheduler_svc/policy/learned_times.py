"""Step times of a replica, learned from its results."""

from dataclasses import dataclass, field
from typing import Final

# Weight of an observation after the next: about the last fifty count.
_KEPT: Final = 0.98

# An observation further from expectation than this factor is an accident, such as a compilation, or the
# first after one.
_OUTLIER: Final = 4.0


class LinearTime:
    """Fits seconds as a linear function of step size to the latest observations."""

    __slots__ = ("_size", "_size_seconds", "_size_size", "_weight", "seconds")

    def __init__(self) -> None:
        """Starts without observations."""
        self._weight = 0.0
        self._size = self._size_size = self._size_seconds = 0.0
        self.seconds = 0.0
        """The mean of the observations."""

    @property
    def known(self) -> bool:
        """Whether anything was observed."""
        return self._weight > 0

    def observe(self, size: float, seconds: float) -> None:
        """Adds an observation; ignores unmeasured steps of 0 seconds."""
        if seconds <= 0:
            return
        if self._weight:
            expected = self.at(size)
            if seconds * _OUTLIER < expected:
                self._weight = 0.0
            else:
                seconds = min(seconds, expected * _OUTLIER)
        self._weight = self._weight * _KEPT + 1
        share = 1 / self._weight
        self._size += (size - self._size) * share
        self.seconds += (seconds - self.seconds) * share
        self._size_size += (size * size - self._size_size) * share
        self._size_seconds += (size * seconds - self._size_seconds) * share

    @property
    def slope(self) -> float:
        """Additional seconds per unit of size, at least 0."""
        variance = self._size_size - self._size**2
        if variance <= 1e-6 * self._size_size:
            return 0.0
        return max(0.0, (self._size_seconds - self._size * self.seconds) / variance)

    def at(self, size: float) -> float:
        """Returns the seconds of a step of this size; at least a tenth of the mean, to bound errors."""
        return max(self.seconds / 10, self.seconds + self.slope * (size - self._size))


@dataclass(slots=True)
class LearnedTimes:
    """Step times of a replica."""

    chunk: LinearTime = field(default_factory=LinearTime)
    """Of prefill steps, by tokens without padding."""
    decode: LinearTime = field(default_factory=LinearTime)
    """Of decode steps, by requests."""
    buckets: dict[int, LinearTime] = field(default_factory=dict)
    """Of prefill steps by bucket. A small bucket may take as long as twice its size, so no line fits all."""

    def observe_chunk(self, tokens: int, bucket: int, seconds: float) -> None:
        """Adds a prefill step of some tokens, padded to its bucket."""
        self.chunk.observe(tokens, seconds)
        self.buckets.setdefault(bucket, LinearTime()).observe(bucket, seconds)

    def of_bucket(self, bucket: int) -> float:
        """Returns the seconds of a prefill step of this bucket, or of the next smaller one already run.

        So each bucket is tried. Without either, the line through all chunks counts; 0 before the first chunk.
        """
        below = max((size for size, time in self.buckets.items() if size <= bucket and time.known), default=0)
        return self.buckets[below].seconds if below else self.chunk.at(bucket)
