"""All requests and all replicas of a deployment.

`engine` ties the parts together: `queueing` has the registry of live requests, the waiting queue and its
limits. `grammar_queue` holds requests that wait for a grammar, `adapter_control` has LoRA adapters loaded for
clients and requests, and `placement` chooses replicas. `prefix_control` serves the clients'
operations on prefix caches; `load` holds figures for clients and metrics. Imported by `workers`, `api` and
`metrics`; imports `replica` and the rooms below.
"""
