"""The kinds of warmup cache that warmseed seeds; a kind is one class in one module."""
