"""``python -m warmseed.daemon.engines.vllm.rehearse [--usage serve|llm] -- VLLM FLAGS…``

What every restart will do is done once, here: a throwaway engine with the engine's own code and configuration maps the
daemon's weights through the sockets that ``--model-loader-extra-config`` names, profiles, tunes, compiles, captures,
answers one token and exits. Each of its ranks reports its evidence to the daemon whose weights it mapped (`observe`).
The last line of its output is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Final

from warmseed.daemon.engines.vllm.arguments import parse_engine_arguments, usage_context
from warmseed.errors import ConfigurationError

__all__ = ["main"]

_REQUEST: Final = "warmseed-rehearsal"
_STEPS: Final = 1000  # of the engine for one token; a loop that never ends would hold the GPU


def main() -> int:
    """Rehearse once; 0 when a token came, 1 when none did, 2 for flags that can't work."""
    parser = argparse.ArgumentParser(prog="warmseed-rehearse")
    parser.add_argument("--usage", choices=("serve", "llm"), default="serve")
    parser.add_argument("flags", nargs="+")
    given = parser.parse_args()
    start = time.monotonic()
    try:
        arguments = parse_engine_arguments(given.flags)
    except ConfigurationError as error:
        print(f"warmseed rehearsal: {error}", file=sys.stderr)
        return 2
    from vllm import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    imported = time.monotonic()
    engine = LLMEngine.from_engine_args(arguments, usage_context=usage_context(given.usage))
    warm = time.monotonic()
    engine.add_request(_REQUEST, "Hello", SamplingParams(temperature=0.0, max_tokens=1))
    answered = False
    for _ in range(_STEPS):
        if any(output.finished for output in engine.step()):
            answered = True
            break
    seconds = {
        "import_s": round(imported - start, 2),
        "init_s": round(warm - imported, 2),
        "answer_s": round(time.monotonic() - warm, 2),
    }
    engine.engine_core.shutdown()
    print(json.dumps({"answered": answered, **seconds}), flush=True)
    return 0 if answered else 1


if __name__ == "__main__":
    sys.exit(main())
