"""The engines warmseed drives; nothing outside an adapter knows an engine's internals."""
