"""The remaining days of a service's certificates, for its metrics."""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protos.service.tls import Expiries


class CertificateDays(Collector):
    """A gauge of remaining days, with a series for each setting whose certificates have a known end."""

    def __init__(self, name: str) -> None:
        """Names the gauge, at first without series."""
        self._name = name
        self.expiries: list[Expiries] = []
        """Of the certificates in use."""

    def days_left(self) -> dict[str, float]:
        """Returns the remaining days of each certificate, by setting; negative after its end."""
        return {flag: days for each in self.expiries for flag, days in each.days_left().items()}

    def collect(self) -> Iterator[Metric]:
        """Yields the gauge, for a scrape."""
        gauge = GaugeMetricFamily(self._name, "Days until the certificate ends.", labels=("setting",))
        for flag, days in self.days_left().items():
            gauge.add_metric((flag,), days)
        yield gauge
