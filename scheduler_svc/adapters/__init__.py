"""LoRA adapters of a deployment: their names, and their use on each replica.

`registry` maps names to adapters and parses settings. `seats` tracks the adapters loaded and in use on a
replica. Synchronous and free of I/O. Imported by `kv`, `requests`, `replica`, `engine`, `workers`, `api`
and the settings. Imports no other room.
"""
