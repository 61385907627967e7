"""The ranks of a replica, from their registrations to its end; a replica on one device has one rank.

`group` gathers the ranks that register, which `rank` describes and compares. Once all are there, `driver`
takes them to their end: `configuring` sets them up together, and the step loop of `workers` steps rank 0.
Imported by `api`; imports `workers`, `convert` and `replica`.
"""
