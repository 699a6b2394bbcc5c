"""Bytes by key: the store contract, the tiers built on it, and the back ends."""
