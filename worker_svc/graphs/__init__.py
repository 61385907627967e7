"""Static graphs: a model's steps recorded once and then run without its Python code.

`capture` records a step. `replay` runs the recorded kernels again; `inductor` compiles
them instead. `graph_runner` builds all graphs before a worker serves and runs them.
`compilation` decides how steps become graphs, makes them and keeps their code, with `fingerprint` and
`compile_cache`. `pooling`, `vllm_adapter`, `execution` and `deploy`
import this room; it imports `devices` and `shapes`.
"""
