"""Generated stubs of the schema, by package version."""
