"""The subcommands of `triptych` that call a server, one module each.

`server` has the flags that name a server, its client and its errors in one line; `chat` has the printing that
`complete` shares. They use the `openai` package, and `bench` an installed vLLM. `deploy.cli` imports the
room; it imports the launcher's module for child processes and the argument parser.
"""
