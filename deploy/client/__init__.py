"""What the commands share that call a running gateway, or any other server with OpenAI's interface.

`connection.py` has the flags that say where the server is, and its errors in one line. `answers.py` prints
streamed answers, `workloads.py`, `load.py` and `figures.py` are the parts of `triptych bench`, and
`batch_file.py`, `batch_run.py` and `local_stack.py` those of `triptych run-batch`.

`deploy.client_commands` imports this room. It imports httpx, the launcher's module for child processes and
nothing of the services.
"""
