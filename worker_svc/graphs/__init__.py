"""Static graphs: a model's steps recorded once and then run without its Python code.

`capture` records a step. `replay` runs the recorded kernels again; `graph_partition` and `inductor`
compile them instead. `graph_runner` builds all graphs before a worker serves and runs them.
`fingerprint`, `compile_cache`, `compiler_folders` and `precompiled` keep compiled code on disk.
`vllm_adapter`, `execution` and `deploy` import this room; it imports `devices` and `shapes`.
"""
