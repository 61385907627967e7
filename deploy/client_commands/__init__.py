"""The subcommands of `triptych` for a running server, a module each.

`server` holds the flags for its address, its client and its errors; `complete` shares the printing of `chat`.
They use the `openai` package, and `bench` an installed vLLM. `deploy.cli` imports the room; it imports the
launcher's module for child processes and the argument parser.
"""
