"""Steps of several ranks: `lockstep` keeps them on the same steps, `stage` joins the stages of a pipeline.

`rank_facts` has what all ranks must have alike. The other modules of `execution` import this folder; it
imports `worker_svc.ranks`.
"""
