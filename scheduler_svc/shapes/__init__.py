"""Static shapes of a deployment: the sizes of compiled graphs and block tables.

`shape_config` chooses and checks the shapes, `buckets` makes decode batch sizes and fits them to traffic, and
`batch_histogram` records the traffic. Imported by `kv`, `replica`, `workers`, the settings and the
command line. Imports no other room.
"""
