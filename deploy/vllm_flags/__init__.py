"""The flags of `vllm serve` and vLLM-RBLN, and their meaning here.

`flags.toml` lists the translated and the rejected flags, and `names/` every name known to the other programs;
`python -m tests.support.peer_names` writes those lists. `translate` joins them, and turns a command line
of vLLM's into ours. The commands `up`, `serve` and `compile` use the room.
It imports neither vLLM nor torch.
"""
