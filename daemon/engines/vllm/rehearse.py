"""``python -m warmseed.daemon.engines.vllm.rehearse [--usage serve|llm] -- VLLM FLAGS…``

What every restart will do is done once, here: a throwaway engine with the engine's own code and configuration maps the
daemon's weights through the sockets that ``--model-loader-extra-config`` names, profiles, tunes, compiles, captures,
answers one token and exits. Each of its ranks reports its evidence to the daemon whose weights it mapped (`observe`).
The last line of its output is JSON.

Of an engine that spans nodes, this runs on each: the head on node 0, the workers of the others until the head has gone.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from typing import TYPE_CHECKING, Final

from warmseed.daemon.engines.vllm.arguments import parse_engine_arguments, usage_context
from warmseed.errors import ConfigurationError

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

__all__ = ["main"]

_REQUEST: Final = "warmseed-rehearsal"
_POLL_S: Final = 1.0  # seconds between looks at the head
_CONNECT_S: Final = 10.0  # seconds for it to answer
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
    if arguments.node_rank > 0:
        return _follow(arguments, usage_context(given.usage))
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


def _follow(arguments: EngineArgs, usage: UsageContext) -> int:
    """This node's workers of an engine whose head is another node; 0 once the head has gone, 1 if a worker has."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    config = arguments.create_engine_config(usage_context=usage, headless=True)
    executor = MultiprocExecutor(config, monitor_workers=False)  # returns when all nodes' workers have met
    head = (config.parallel_config.master_addr, config.parallel_config.master_port)
    while all(worker.proc.is_alive() for worker in executor.workers):
        if not _answers(head):
            executor.shutdown()
            return 0
        time.sleep(_POLL_S)
    executor.shutdown()
    return 1


def _answers(address: tuple[str, int]) -> bool:
    """Whether somebody listens there: the rendezvous of an engine's workers, which its first one keeps."""
    try:
        with socket.create_connection(address, timeout=_CONNECT_S):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
