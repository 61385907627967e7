"""The flags of `vllm serve` and vLLM-RBLN, and their meaning here.

`flags.toml` has the flags that are translated or rejected, and `names/` every name that the other programs
know; `python -m tests.support.peer_names` writes those lists. `table` joins them, `values` converts values,
and `translate` turns a command line of vLLM's into ours. The commands `up`, `serve` and `compile` use the
room. It imports neither vLLM nor torch.
"""
