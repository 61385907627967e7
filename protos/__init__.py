"""The seam between the services: everything that both ends of a connection must agree on.

`triptych/v1` has the schema and its generated stubs (`generate`). `limits` and `validation` hold the bounds
of requests and enforce them; `steps` and `step_messages` are step plans and results, as types and as
messages; `kv_groups` has the kinds of KV groups. `errors` is the tree of failures that cross a service's
border. `wire` has the schema revision, message sizes and keepalive, `server` a gRPC server with health and
reflection, `overload` the bounds that protect a service from its clients. `settings` and `logs` serve all
services in the same way.

All packages import this one; it imports none of them.
"""

import os

# gRPC reads this once, when it is imported. Its new event engine, Python's default since 1.80, passes every
# message through threads of its own, which doubles the context switches.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
