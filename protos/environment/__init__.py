"""Variables of vLLM and its NPU plugins, and their meaning here.

`variables.toml` has the variables that mean something, and `names/` every name that the other programs know;
`python -m tests.support.peer_names` writes those lists. `table` reads an environment by both, and stops the
start of a service if a variable would change answers. Services and `deploy` import it; it imports
`protos.errors` and `protos.logs` alone.
"""
