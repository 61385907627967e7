"""The worker's gRPC service and its registration with the scheduler.

`servicer` implements the RPCs on top of `execution.worker`; `plan_runner` runs plans;
`convert` maps messages to the worker's types; `model_thread` runs everything that uses the model;
`watchdog` ends a worker that hangs or always fails; `registration` announces the worker to the scheduler.
Imported by `service` and `deploy`; imports `execution` and the rooms below it.
"""
