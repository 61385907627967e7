"""Protection of a service from its clients.

`call_limit` bounds concurrent gRPC calls, `unread` output not yet read by clients. `protos.server` and the
services import them; they import errors and the wire's types.
"""
