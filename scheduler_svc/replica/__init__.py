"""The decisions of a replica: which requests hold a slot, the next step, and the meaning of a result.

`scheduler` decides a step and takes in its result. It composes `slots` (requests with a slot), `decode_rows`
(decoding requests), `plans` (the next plan, and plans in flight), `quarantine` (requests under
suspicion of having killed a worker), `prefix_waiters` (requests waiting for a prefix in progress), `results`
(from results to events) and `stats`. `pooling` decides the batches of a pooling model. Plans and results are
types of `protos.steps`. Synchronous and free of I/O. Imported by `engine`, `workers` and the metrics.
Imports `kv`, `adapters`, `policy`, `requests` and `shapes`.
"""
