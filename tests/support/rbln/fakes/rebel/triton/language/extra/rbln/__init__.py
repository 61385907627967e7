"""The vendor's own part of Triton's language."""
