"""All requests and all replicas of a generating deployment.

`engine` ties the parts together: `queueing` has the registry of live requests, the waiting queue and its
limits, `grammar_queue` holds requests that wait for a grammar, and `placement` chooses replicas.
`prefix_control` and `pinned_prefixes` serve the clients' operations on prefix caches; `load` holds figures
for clients and metrics. Imported by `pooling`, `convert`, `workers`, `api` and `metrics`; imports `replica`
and the rooms below.
"""
