"""A fake of vllm_rbln: only the modules that declare the Triton operators."""
