"""Runs beside the servers of the gateway's bench: engines that only emit tokens, and a counting client."""
