"""What protects the gRPC connections between services: TLS, client certificates and the service token.

`settings` has the flags that all services share, and `links` what they make: secured servers and channels.
`certificates` and `tokens` read files and read them again when they change (`watched_files`). `token_check`
refuses calls in a server; `channel` adds the token to calls and uses new certificates. `waiting` waits for a
peer and logs why it cannot be reached.

`protos.server` and the services import this room; it imports `settings`, `errors`, `logs` and `wire`.
"""
