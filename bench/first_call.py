"""A process of its own: the seconds that a small model's first call takes under torch.compile."""

from __future__ import annotations

import json
import time

import torch


def main() -> None:
    """Compile, call once, print."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    width = 256
    blocks = [
        torch.nn.Sequential(
            torch.nn.LayerNorm(width),
            torch.nn.Linear(width, 4 * width),
            torch.nn.GELU(),
            torch.nn.Linear(4 * width, width),
        )
        for _ in range(4)
    ]
    compiled = torch.compile(torch.nn.Sequential(*blocks))
    start = time.monotonic()
    with torch.inference_mode():
        compiled(torch.ones(8, width))
    print(json.dumps({"seconds": time.monotonic() - start}))


if __name__ == "__main__":
    main()
