"""Requests: one sequence each, with its sampling parameters, its events and its end.

`admission` checks a client's request against the model and makes requests of it, one per sequence. `request`
holds a request's state, and the sequences that share a prompt. `sampling` is what the scheduler reads of the
sampling parameters, which otherwise pass unopened; its stop rule says when and why sequences end.

Every room above imports this one; it imports `kv` and `adapters` only.
"""
