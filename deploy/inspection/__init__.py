"""What `triptych doctor` says about a command before it starts: no check here needs torch or a device.

`environment.py` and `given.py` say what variables and flags were understood as, and `report.py` prints that
and the results of checks. `host.py` checks ports, folders and packages, `security.py` certificates and keys,
`model.py` the model's files, `services.py` whether the other services answer. `bug_report.py` has what
`triptych env` prints.

`deploy.commands.doctor` and `deploy.client_commands.env` import this room. It imports `deploy.diagnosis`, the
launcher, the services' settings and the worker's readers of model files.
"""
