"""LoRA adapters of a deployment: their names, and the places that hold them on each replica.

`registry` maps names to adapters; `modules` reads them from settings. `host_memory` says which adapters a
replica has in its host's memory or could not load, and `device_slots` which of them lie in slots of its
device, and how many requests use each. Synchronous and free of I/O. Imported by `kv`, `requests`, `replica`,
`dispatch`, `workers` and `api`. Imports no other room.
"""
