"""Variables of vLLM and its NPU plugins, and their meaning here.

`variables.toml` lists the variables with a meaning, and `names/` every name known to the other programs;
`python -m tests.support.peer_names` writes those lists. `table` reads an environment by both, and stops the
start of a service if a variable would change answers. Services and `deploy` import it; it imports
`protos.errors` and `protos.logs` alone.
"""
