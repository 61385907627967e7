"""Attacks of one tenant, and what another tenant sees of them."""
