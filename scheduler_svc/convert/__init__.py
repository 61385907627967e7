"""Between protocol messages and the scheduler's own types: the only modules that know both."""
