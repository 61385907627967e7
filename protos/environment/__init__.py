"""Variables of vLLM, vLLM-RBLN and vLLM-Spyre: what each of them does here, and why.

`variable.py` has the types. `vllm_serving.py` and `vllm_kernels.py` list vLLM's variables, `npu.py` those of
the NPU plugins. `table.py` joins the lists, reads an environment by them, and stops the start of a service
over what is refused. Services and `deploy` import it; it imports `protos.errors` and `protos.logs` alone.
The settings classes read the mapped variables; a test compares them with the table.
"""
