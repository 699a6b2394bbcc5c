# The two commands of the README, and their parts.
.PHONY: demo test setup lint

demo: setup
	@.venv/bin/python bench/demo.py

test: setup lint
	@.venv/bin/pytest -q

setup:
	@.ci/install

lint: setup
	@.venv/bin/ruff format --check -q . && .venv/bin/ruff check -q . && .venv/bin/mypy --no-error-summary && .venv/bin/lint-imports --no-logo >/dev/null 2>&1 || { .venv/bin/ruff format --check .; .venv/bin/ruff check .; .venv/bin/mypy; .venv/bin/lint-imports; exit 1; }
