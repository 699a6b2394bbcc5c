"""warmseed keeps an LLM server's weights and warmup caches hot, on one node and across a fleet."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
