"""A process with Mooncake's own client, for what the tests do behind the store's back.

One JSON array a line on standard input: [method, key, hex bytes or number]. One JSON value a line comes back.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig

    store = MooncakeDistributedStore()
    more = {"tenant_id": sys.argv[2]} if len(sys.argv) > 2 else {}
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 30, "tcp", "", sys.argv[1], **more)
    out.write(json.dumps(code) + "\n")
    pinned = ReplicateConfig()
    pinned.with_hard_pin = True
    for line in sys.stdin:
        method, key, value = json.loads(line)
        if method == "get":
            size = store.get_size(key)
            answer = store.get(key).hex() if size >= 0 else None
        elif method == "size":
            answer = store.get_size(key)
        elif method == "put":
            answer = store.put(key, bytes.fromhex(value))
        elif method == "upsert":
            answer = store.upsert(key, bytes.fromhex(value), pinned)
        elif method == "put-zeros":
            answer = store.put(key, bytes(value << 20))
        elif method == "remove-all":
            answer = store.remove_all(True)
        elif method == "fill":  # unpinned objects of a mebibyte
            answer = [store.put(f"{key}/{i}", os.urandom(1 << 20)) for i in range(value)]
        elif method == "fill-pinned":
            answer = [store.put(f"{key}/{i}", bytes(1 << 20), pinned) for i in range(value)]
        else:
            answer = store.remove(key, True)
        out.write(json.dumps(answer) + "\n")
    out.flush()
    os._exit(0)


main()
