"""LoRA adapters of a deployment: their names, and the use that requests make of them on each replica.

`registry` maps names to adapters; `modules` reads them from settings. `seats` counts, for a replica, the
adapters in use, and knows those that its worker has. Synchronous and free of I/O. Imported by `kv`,
`requests`, `replica`, `dispatch`, `workers` and `api`. Imports no other room.
"""
