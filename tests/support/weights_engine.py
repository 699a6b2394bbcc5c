"""An engine that maps the small model from the daemon at argv[1]; argv[2] is JSON: mode, fallback, scribble."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from weights_model import digests, fingerprint, shell

from warmseed.daemon.weights.client import attach, map_into
from warmseed.daemon.weights.errors import WeightCacheUnavailable
from warmseed.daemon.weights.messages import Report
from warmseed.daemon.weights.socket import SocketAddress


def main(path: str, options: dict[str, object]) -> None:
    model = shell()
    try:
        attachment = attach(
            SocketAddress(Path(path)),
            fingerprint(**options.get("fingerprint", {})),
            mode=options.get("mode", "zero_copy"),
            fallback=options.get("fallback", True),
            state_timeout_s=options.get("state_timeout_s", 30.0),
        )
    except WeightCacheUnavailable as error:
        print(json.dumps({"reason": error.reason, "fields": error.fields, "message": str(error)}), flush=True)
        return
    report = map_into(model, attachment)
    seen = digests(model)
    if options.get("scribble"):
        for parameter in model.parameters():
            parameter.data.view(-1)[:1].zero_() if parameter.is_contiguous() else parameter.data.zero_()
    if options.get("report"):
        attachment.report(Report(seconds=1.5, counters={"hits": 3}, lines=("warm",)))
    print(
        json.dumps(
            {
                "digests": seen,
                "mapped": report.mapped,
                "materialised": report.materialised,
                "tied": model.head.weight is model.embed.weight,
                "shared": model.layers[0].rotary is model.layers[2].rotary,
                "released": attachment.released.outcome if attachment.released else None,
            }
        ),
        flush=True,
    )
    sys.stdin.read()
    print(json.dumps({"daemon_gone": attachment.daemon_gone.wait(0 if not options.get("wait_gone") else 20)}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {})
