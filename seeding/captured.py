"""Where a captured payload waits until it is published: in a file of its own, whoever else captured the same bytes.

The ranks of one engine, and engines side by side, share a state folder, and what they capture is often the same.
Who has published deletes the file it published from; a file with a name that another one uses would go with it.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from pathlib import Path
from typing import Final

__all__ = ["new_payload"]

_FORGOTTEN: Final = 86400.0  # seconds after which nobody publishes a file any more; the process that made it died


def new_payload(folder: Path, digest: str) -> Path:
    """A path in `folder` (made, if need be) for the payload with this digest, which no other capture is given.

    Sweeps what processes that died before they had published left there.

    Raises:
        OSError: when the folder can't be made or read.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # another rank sweeps as well
            if time.time() - path.stat().st_mtime > _FORGOTTEN:
                path.unlink()
    return folder / f"{digest}.{secrets.token_hex(4)}"
