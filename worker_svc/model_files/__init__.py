"""A model's files: found, fetched, checked and converted, without loading any weights.

`loader` resolves the `--model` setting to a folder, fetches packaged demo models and caches converted GGUF
files; `gguf_convert` is the converter, run as a program, with `gguf_weights`, and `gguf_file` reads for it;
`checkpoint` reads safetensors headers; `quantize` writes quantized folders. Imported by `execution`,
`vllm_adapter`, `api` and the `triptych` commands; imports `settings` and `quantized`.
"""
