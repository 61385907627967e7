"""Requests of a single sequence each: sampling parameters, events and end.

`admission` checks a client's request against the model and makes a request of each sequence; `pooled_model`
checks those of a pooling model. `request` holds
a request's state, and the sequences that share a prompt. `sampling` reads the few sampling parameters of
interest to the scheduler; its stop rule decides when and why sequences end. `trace` writes spans.

Every higher room imports it; it imports `kv` and `adapters` only.
"""
