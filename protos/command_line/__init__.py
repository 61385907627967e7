"""What command lines have beside the flags of a settings class.

`config_file` reads `--config FILE.yaml`, `dialect` says how a command accepts the flags of another program,
and `suggestions` finds the flag that was meant. `protos.settings` imports this room; the room imports
`protos.errors` alone.
"""
