"""Parts of command lines in addition to the flags of a settings class.

`config_file` reads `--config FILE.yaml` through `yaml_text`, `foreign_flags` is the interface to another
program's flags, and `suggestions` finds the intended flag. `hiding` keeps secrets out of refusals.
`examples` holds the examples of `--help`, and `help_search` answers `--help=WORD`. `protos.settings` and
commands of `deploy` import this room, and the gateway's keys import `yaml_text`; the room imports
`protos.errors` and `protos.environment`.
"""
