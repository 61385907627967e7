"""The scheduler's gRPC services."""
