"""Static shapes of a deployment: everything that compiled graphs and block tables are sized by.

`geometry` checks the shapes once, `buckets` makes decode batch sizes, `bucket_planner` fits them to traffic,
`batch_histogram` records that traffic, and `pool_shapes` has the shapes of pooling models. Imported by `kv`,
`replica`, `pooling`, `workers`, `convert`, the settings and the command line. Imports no other room.
"""
