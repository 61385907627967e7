"""KV group managers: how the layers of one group use blocks.

`base` has the interface, the block table and the layout; `full`, `paged_window` and `in_place_window`
implement one kind of attention each. Only `kv` imports this room. It imports the block pool and `shapes`.
"""
