"""Subcommands of `triptych`, one file each."""
