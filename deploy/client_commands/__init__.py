"""The subcommands of `triptych` that call a running gateway, one module each.

A module's `main(argv)` runs it and returns the exit code. Only `deploy.cli` imports these modules. They
import `deploy.client`.
"""
