"""A plain HTTP server: GET and HEAD of the files below a folder and, unless read-only, PUT.

Usage: http_folder.py PORT FOLDER [read-only]
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

from aiohttp import web


def main() -> None:
    port, folder, read_only = int(sys.argv[1]), Path(sys.argv[2]), "read-only" in sys.argv

    async def get(request: web.Request) -> web.StreamResponse:
        path = folder / request.match_info["key"]
        if not path.is_file():
            raise web.HTTPNotFound
        return web.FileResponse(path)

    async def put(request: web.Request) -> web.Response:
        if read_only:
            raise web.HTTPMethodNotAllowed("PUT", ["GET", "HEAD"])
        path = folder / request.match_info["key"]
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{secrets.token_hex(8)}"
        length = 0
        try:
            with temporary.open("wb") as file:
                async for piece in request.content.iter_chunked(1 << 20):
                    file.write(piece)
                    length += len(piece)
            if length != request.content_length:
                raise web.HTTPBadRequest
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        return web.Response(status=201)

    app = web.Application(client_max_size=1 << 40)
    app.router.add_get("/{key:.+}", get)
    app.router.add_put("/{key:.+}", put)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


main()
