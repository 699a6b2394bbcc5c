"""Tests that run in an environment of their own, with a real vLLM: ``.ci/test-vllm``.

Elsewhere there is nothing here to collect; ``.ci/test-vllm`` fails if it collects nothing.
"""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
