"""The subcommands of `triptych` that need no service's settings, one module each.

`chat`, `complete`, `bench` and `run-batch` call a running gateway; `env` describes this machine for a bug
report. A module's `main(argv)` runs it and returns the exit code. Only `deploy.cli` imports these modules.
They import `deploy.client`, and for `env` `deploy.inspection`.
"""
