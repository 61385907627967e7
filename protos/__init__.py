"""The schema between the services, and the checks of both its ends.

`triptych/v1` is the schema with its generated stubs (`generate`). `limits` and `validation` hold the bounds
of requests and enforce them; `steps` and `step_messages` are step plans and results, as types and as
messages. `errors` is the tree of failures between services, and `service` the plumbing of every process.
All packages import this package; it imports none of them.
"""

import os

# gRPC reads this once, when it is imported, and knows no other way to choose. Its new event engine, Python's
# default since 1.80, passes every message through threads of its own, which doubles the context switches.
_given = os.environ.get("GRPC_EXPERIMENTS", "")
if "event_engine" not in _given:
    _old_engine = "-event_engine_client,-event_engine_listener"
    os.environ["GRPC_EXPERIMENTS"] = f"{_given},{_old_engine}" if _given else _old_engine
