"""The flags of `vllm serve` 0.32, and what each of them is here.

`table.FLAGS` has one row per flag: the name, the kind (alias, mapped, moot or refused), our flag and the
reason. `translate` turns a command line of vLLM's into one of ours. The commands `up`, `serve` and `compile`
use it, and the migration guide prints the table. The room imports neither vLLM nor torch; a test compares it
with vLLM's own parser, so that no flag is missing.
"""
