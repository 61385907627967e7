"""The worker's gRPC service and its registration with the scheduler.

`servicer` implements the RPCs with `execution.worker`; `plan_stream` receives plans and `plan_runner` runs
them; `convert` maps messages to the worker's types; `model_thread` is the only thread to use the model;
`watchdog` ends a hanging or always failing worker; `registration` announces the worker to the scheduler.
Imported by `service` and `deploy`; imports `execution` and the rooms below it.
"""
