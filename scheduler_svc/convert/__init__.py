"""The only modules that turn protocol messages into the scheduler's types and back.

`requests` reads clients' requests, `events` and `kv_events` write what clients receive, `load` writes load
reports. `model` and `configuration` translate a worker's description and its configuration. Step plans and
results are translated by :mod:`protos.step_messages`, which the worker shares.

`api` and `workers` import this package; it imports `pooling`, `dispatch`, `requests`, `kv` and `shapes`.
"""
