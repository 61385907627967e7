"""LoRA adapters of a deployment: their names, and their use on each replica.

`registry` maps names to adapters; `modules` parses them from settings. `seats` tracks the adapters loaded and
in use on a replica. Synchronous and free of I/O. Imported by `kv`, `requests`, `replica`, `dispatch`,
`workers` and `api`. Imports no other room.
"""
