"""Helpers that test folders share: tiny random models on disk, engines on them, and reference answers."""
