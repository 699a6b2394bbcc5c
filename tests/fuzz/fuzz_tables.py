"""Fuzz target: autotune tables, managed entries and payloads of stores.

Run it for as long as you like: ``python -m tests.fuzz.fuzz_tables tests/fuzz/corpus/tables -max_total_time=600``.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["warmseed.seeding.kinds.autotune"]):
    from tests.support.table_rules import one_input

if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
