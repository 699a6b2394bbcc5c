"""Fuzz target: the tar reader, envelopes, manifests, file indexes, keys and group files.

Run it for as long as you like: ``python -m tests.fuzz.fuzz_bundle tests/fuzz/corpus/bundle -max_total_time=600``.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["warmseed.seeding"]):
    from tests.support.bundle_rules import one_input

if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
