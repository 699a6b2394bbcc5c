"""``python -m warmseed.daemon.launcher.leash COMMAND…``: run a command that the kernel kills when its starter dies.

The parent death signal survives `execve`, so programs that know nothing of it (an engine in rehearsal) can't
outlive the launcher either.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from warmseed.daemon.launcher.processes import die_with_parent

__all__ = ["leashed"]


def leashed(command: Sequence[str]) -> tuple[str, ...]:
    """`command`, to be started so that it dies with the process that starts it."""
    return (sys.executable, "-P", "-m", "warmseed.daemon.launcher.leash", *command)


if __name__ == "__main__":
    die_with_parent()
    try:
        os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 (our caller's command, no shell)
    except (OSError, IndexError) as problem:
        sys.exit(f"can't run {sys.argv[1:2]}: {problem}")
