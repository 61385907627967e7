"""The checks behind `triptych doctor`: what a worker needs of this machine, each with one line of result.

`findings.py` runs checks and keeps what they found. `machine.py` checks settings, packages and folders,
`device.py` what every device must do, `npu.py` what only an NPU has, `ranks.py` what several ranks need.
`parity.py` runs a model in `local_replica.py` and compares it with transformers in `reference.py`.

`deploy.commands.doctor` imports this package. It imports the services' settings, the worker's devices, and
for `--parity` the worker and the scheduler. It imports torch only while checks run, so that a missing torch
is a finding, too.
"""
