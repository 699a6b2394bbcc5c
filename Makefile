# The two commands of the README, and their parts.
.PHONY: demo test test-vllm setup lint

demo: setup
	@.venv/bin/python bench/demo.py

# In the order of the files, so that a failure elsewhere is the same failure here; bare `pytest` shuffles them.
# The venv's programs come first: builds and the proofs about them must ask one ninja.
test: setup lint
	@PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/pytest -q -p no:randomly

# Real vLLM on the CPU, in a venv of its own: about three minutes to install, twenty to run.
test-vllm: setup
	@.ci/install-vllm
	@.ci/test-vllm

setup:
	@.ci/install

lint: setup
	@.venv/bin/ruff format --check -q . && .venv/bin/ruff check -q .
	@.venv/bin/mypy --no-error-summary
	@.venv/bin/lint-imports --no-cache >.lint-imports.log 2>&1 || { cat .lint-imports.log; exit 1; }
	@rm -f .lint-imports.log
