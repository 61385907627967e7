"""Bounds that protect a service from its clients.

`call_limit` bounds the gRPC calls at once, `unread` what waits for clients that read slowly. `protos.server`
and the services import them; they import errors and the wire's types.
"""
