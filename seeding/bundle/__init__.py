"""Compiled caches as one content-addressed, canonical archive."""
