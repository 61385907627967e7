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

# gRPC reads this once, when it is imported, and knows no other way to choose. Its new event engine, Python's
# default since 1.80, passes every message through threads of its own, which doubles the context switches.
_given = os.environ.get("GRPC_EXPERIMENTS", "")
if "event_engine" not in _given:
    _old_engine = "-event_engine_client,-event_engine_listener"
    os.environ["GRPC_EXPERIMENTS"] = f"{_given},{_old_engine}" if _given else _old_engine
