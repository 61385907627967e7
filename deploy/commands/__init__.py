"""The subcommands of `triptych`: functions that take the arguments and return the exit code.

`triptych gateway`, `scheduler` and `worker` are elsewhere: the services' own `__main__` modules. `client`
holds the flags, the client and the errors of commands for a running server, which use the package `openai`.
Only `deploy.cli` imports these modules, by name, so a command loads only its own imports.
They import `deploy.checks`, `deploy.launcher`, the services' settings and, for `plan`, `compile`, `catalog`
and `models`, the working modules of a service.
"""
