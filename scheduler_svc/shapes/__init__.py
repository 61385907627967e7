"""Static shapes of a deployment: the sizes of compiled graphs and block tables.

`shape_config` checks the shapes once, `buckets` makes decode batch sizes and fits them to traffic,
`batch_histogram` records the traffic, and `pool_shapes` holds the shapes of pooling models. Imported by `kv`,
`replica`, `pooling`, `workers`, the settings and the command line. Imports no other room.
"""
