"""Spans of requests, for an OpenTelemetry collector: the tracer that all three services share.

Every service imports this room, which imports only ``errors``. OpenTelemetry itself is an extra (``otel``):
only ``export`` imports it, and nothing imports ``export`` before a service with an endpoint starts.
"""
