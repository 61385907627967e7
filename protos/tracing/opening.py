"""Opens tracers, and imports OpenTelemetry only then."""

from protos.errors import ConfigurationRefused
from protos.tracing.tracer import Tracer


def open_tracer(endpoint: str | None, service: str) -> Tracer | None:
    """Returns the tracer of a service ("gateway"); None, and nothing is imported, without an endpoint.

    Raises:
        ConfigurationRefused: OpenTelemetry is not installed, or its variables do not fit the endpoint.
    """
    if endpoint is None:
        return None
    try:
        from protos.tracing.export import OtlpTracer
    except ImportError as error:
        raise ConfigurationRefused(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}); install triptych[otel]"
        ) from error
    return OtlpTracer(endpoint, service)
