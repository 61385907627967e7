"""The launcher of `triptych up`: starts the services as child processes and keeps them running.

`settings.py` derives its settings from the services'; `service_flags.py` turns them into command lines.
`stack_plan.py` claims a folder and ports for these. `process.py` runs one child. `supervisor.py` restarts
children, keeps standbys for workers and stops all in order. `log_tail.py` reads the logs.

`deploy.cli` and `deploy.commands` import this package. It imports the services' settings and `protos`.
"""
