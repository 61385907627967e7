"""The scheduler service.

Owns every KV block and every batch, computes with integers only, never imports torch.

Rooms from the top down: `api`, `workers`, `engine`, `replica`, `policy`, `requests`, `kv`,
`shapes`. A room imports only rooms below it. `__main__` composes the service, `settings` holds its flags, and
`metrics` renders what `/metrics` shows.
"""
