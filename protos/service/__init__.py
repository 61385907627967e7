"""The plumbing of every process: settings, logs, gRPC servers and channels, tracing and back-pressure.

`settings` reads flags, variables and the file of `--config` (`config_file`); `help` answers `--help`, and
`redaction` keeps secrets out of texts. `environment` knows the variables of vLLM and its NPU plugins.
`server` is a gRPC server with health and reflection, `channels` the connections to other services; `tls` and
`tokens` read their secrets, set by `common_settings`, and `grpc_options` holds message sizes and keepalive.
`backpressure` bounds unread output. Only `tracing_export` imports OpenTelemetry.
"""
