"""A process of its own that compiles a small model with torch: prints seconds and torch's cache counters as JSON."""

from __future__ import annotations

import json
import time

import torch
from torch._dynamo.utils import counters


def main() -> None:
    torch.set_num_threads(2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU()) for _ in range(2)))
    compiled = torch.compile(model)
    start = time.monotonic()
    with torch.inference_mode():
        total = float(compiled(torch.ones(4, 32)).sum())
    counted = {f"{area}_{name}": n for area in ("inductor", "aot_autograd") for name, n in counters[area].items()}
    print(json.dumps({"seconds": time.monotonic() - start, "total": total, "counters": counted}))


if __name__ == "__main__":
    main()
