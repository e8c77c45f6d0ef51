"""Drafting, verifying, accepting, and choosing how far to draft."""
