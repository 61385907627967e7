"""`triptych doctor`: whether a command would start, and whether the device computes correctly.

`starts.py` builds the services' own settings as `triptych up` does and calls the services' own checks.
`device.py` finds broken drivers and compilers, which a start would not find, and `parity.py` compares a whole
model with transformers. `check_results.py` prints the results and the sources of the settings.

Torch is imported only while checks run: a machine without it gets a result, too.
"""
