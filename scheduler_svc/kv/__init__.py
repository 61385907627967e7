"""KV memory of one replica: blocks, block tables, prefix hashes, copies and cache events.

`cache` gives sequences their blocks; `prefix_index` finds cached prefixes and makes computed ones findable;
`sequence` is the handle that a request holds, with its prefix hashes. Below them: `block_pool`, `groups` (one
block manager per kind of attention), `copies` (device-to-device copies that the next plan carries), `events`
(the log that others follow), `window_policy` and `stats`. Imported by `requests`, `replica`, `dispatch`,
`convert` and `workers`. Imports only `adapters` and `shapes`.
"""
