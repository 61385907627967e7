"""The worker's gRPC side."""
