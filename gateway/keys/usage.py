"""Metrics of keys, by their names."""

from prometheus_client import CollectorRegistry, Counter

from gateway.http.middleware import Outcome


class KeyUsage:
    """Counts what each key has used."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Adds the metrics to ``registry``."""
        self._requests = Counter(
            "triptych:gateway_key_requests",
            "Answered HTTP requests with an API key.",
            ("key", "status"),
            registry=registry,
        )
        self._tokens = Counter(
            "triptych:gateway_key_tokens",
            "Tokens of HTTP requests with an API key.",
            ("key", "kind"),
            registry=registry,
        )

    def count(self, key: str, outcome: Outcome) -> None:
        """Counts the answer to a request; ``key`` is the key's name."""
        self._requests.labels(key, str(outcome.status)).inc()
        for kind, count in (("prompt", outcome.prompt_tokens), ("completion", outcome.completion_tokens)):
            if count:
                self._tokens.labels(key, kind).inc(count)
