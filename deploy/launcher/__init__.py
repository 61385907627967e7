"""The single-machine launcher behind `triptych up`: starts the services as child processes and keeps them running."""
