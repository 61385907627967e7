"""The subcommands of `triptych`, one module each; a module's `main(argv)` runs it and returns the exit code.

`triptych gateway`, `scheduler` and `worker` are not here: they are the services' own `__main__` modules.
Only `deploy.cli` imports these modules, by name and one at a time, so a command loads only what it needs.
They import `deploy.launcher`, the services' settings and, for `plan`, `compile`, `catalog` and `models`, the
modules of a service that do the work.
"""
