"""Protection of the gRPC connections between services: TLS, client certificates and the service token.

`settings` defines the common flags, and `links` the resulting servers and channels. `certificates` and
`tokens` read files, again after each change (`watched_files`). `token_check` refuses calls in a server;
`channel` adds the token to calls and uses new certificates. `waiting` waits for a peer and logs the reason
of its absence. `protos.server` and the services import this room; it imports `settings`, `errors`, `logs`
and `wire`.
"""
