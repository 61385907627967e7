"""What command lines have beside the flags of a settings class.

`config_file` reads `--config FILE.yaml` through `yaml_text`, `dialect` says how a command accepts the flags
of another program, and `suggestions` finds the flag that was meant. `hiding` keeps secrets out of refusals.
`examples` has what `--help` shows, and `help_search` answers `--help=WORD`. `protos.settings` and commands of
`deploy` import this room, and the gateway's keys import `yaml_text`; the room imports `protos.errors` and
`protos.environment`.
"""
