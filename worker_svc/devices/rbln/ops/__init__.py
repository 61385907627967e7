"""The attention operators that rebel-compiler lowers to NPU kernels, with references for a CPU.

`signatures` lists the operators' arguments, `checks` validates their shapes, `reference` computes their
results, `registry` registers them with torch and calls them. `experts` is the vendor's operator for
expert layers. The sources are the wheels vllm-rbln 0.12.0 and 0.11.2;
`tests/contract/worker/test_rbln_wheels.py` compares with them.
"""
