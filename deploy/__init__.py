"""The command `triptych`, and everything that packages and starts the three services.

`cli.py` dispatches to the subcommands in `commands/`; `launcher/` runs the services as child processes.
`images/` has a Dockerfile for each service, and `locks/` the exact versions that each of them installs.
`healthcheck.py` is what containers run to report their health.

No service imports this package. It imports the services' settings, and in `commands/` a few of their modules.
"""
