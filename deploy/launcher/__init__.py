"""The launcher behind `triptych up`: starts the services as child processes and keeps them running.

`settings.py` derives its settings from the services'; `service_flags.py` turns them into command lines, and
`ports.py` finds free ports.
`supervisor.py` restarts children and stops them in order, `process.py` runs one child, `deaths.py` says what
follows when it dies, and `parent.py` ends the children of a dead launcher. `standbys.py` keeps processes that
replace dead workers; `standby_worker.py` is their command. `run_dir.py` owns the folder with pid files and
logs; `log_tail.py` reads the logs.

`deploy.cli` and `deploy.commands` import this package. It imports the services' settings and `protos`.
"""
