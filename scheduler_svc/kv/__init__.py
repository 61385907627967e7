"""KV memory of one replica: blocks, block tables, prefix hashes, copies and cache events.

`cache` gives sequences their blocks; `prefix_index` finds cached prefixes, indexes computed blocks and values
sliding windows; `sequence` is a request's handle, with its prefix hashes. Below them: `block_pool`, `groups`
(a block manager per kind of attention), `copies` (device-to-device copies for the next plan) and `events`
(the log of changes). Imported by `requests`, `replica`, `engine`, `api` and `workers`. Imports only
`adapters` and `shapes`.
"""
