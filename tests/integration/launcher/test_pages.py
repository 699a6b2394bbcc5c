"""Health, metrics and status tell the truth about real ranks, at every moment of their life."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.nodes import TOY, free_port, toy_config

from warmseed.daemon.launcher.board import Board
from warmseed.daemon.launcher.launcher import launch


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def visit(folder: Path, paths: list[str], **settings: object) -> dict[str, tuple[int, str]]:
    """What the pages answer once the toy ranks are ready."""
    port = free_port()
    answers: dict[str, tuple[int, str]] = {}

    async def whole() -> None:
        ready = asyncio.Event()
        config = toy_config(folder, weight_cache_health_port=port, **settings)
        running = asyncio.create_task(launch(config, rank_command=TOY, on_ready=lambda _: ready.set()))
        async with asyncio.timeout(30):
            await ready.wait()
            # What the ranks sent with or right after their readiness arrives within the same moment.
            while "warmseed_artifacts_total{" not in (await asyncio.to_thread(get, port, "/metrics"))[1]:
                pass
            for path in paths:
                answers[path] = await asyncio.to_thread(get, port, path)
            os.kill(os.getpid(), signal.SIGTERM)
            assert await running == 143

    asyncio.run(whole())
    return answers


def test_health_is_200_exactly_while_all_ranks_serve(tmp_path: Path) -> None:
    port = free_port()
    answers: list[tuple[int, str]] = []

    async def whole() -> None:
        ready = asyncio.Event()
        config = toy_config(tmp_path, {"pace": 0.05}, tensor_parallel_size=2, weight_cache_health_port=port)
        running = asyncio.create_task(launch(config, rank_command=TOY, on_ready=lambda _: ready.set()))
        async with asyncio.timeout(30):
            await asyncio.sleep(0)
            answers.append(await asyncio.to_thread(get, port, "/health"))
            await ready.wait()
            answers.append(await asyncio.to_thread(get, port, "/health"))
            os.kill(os.getpid(), signal.SIGTERM)
            await running

    asyncio.run(whole())
    assert answers[0][0] == 503
    assert "is starting" in answers[0][1] or "no rank" in answers[0][1]
    assert answers[1][0] == 200
    assert json.loads(answers[1][1]) == {"status": "serving", "ranks": 2, "serving": 2, "troubles": []}


def test_health_is_503_from_the_moment_a_rank_is_gone(tmp_path: Path) -> None:
    port = free_port()
    seen: list[int] = []

    async def whole() -> int:
        ready = asyncio.Event()
        boards: list[Board] = []

        def on_ready(board: Board) -> None:
            boards.append(board)
            ready.set()

        # The second rank ignores SIGTERM, so the group takes its whole grace to end.
        plan = {"target-1": {"at": "load", "do": "deaf"}}
        config = toy_config(tmp_path, plan, tensor_parallel_size=2, weight_cache_health_port=port)
        running = asyncio.create_task(launch(config, rank_command=TOY, on_ready=on_ready))
        async with asyncio.timeout(30):
            await ready.wait()
            os.kill(boards[0].ranks["target-0"].pid or 0, signal.SIGKILL)
            while not boards[0].stopping:  # noqa: ASYNC110 (milliseconds, and the board has no event)
                await asyncio.sleep(0.001)
            seen.append((await asyncio.to_thread(get, port, "/health"))[0])
            os.kill(boards[0].ranks["target-1"].pid or 0, signal.SIGKILL)
            return await running

    assert asyncio.run(whole()) == 137
    assert seen == [503]


def test_metrics_are_valid_and_tell_phases_tiers_and_engines(tmp_path: Path) -> None:
    answers = visit(tmp_path, ["/metrics"], tensor_parallel_size=2, speculative_config='{"method":"mtp"}')
    status, text = answers["/metrics"]
    assert status == 200
    families = {family.name: family for family in text_string_to_metric_families(text)}
    values = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert values["warmseed_ready", ()] == 1
    assert values["warmseed_ranks", ()] == 4
    assert values["warmseed_tier_reads_total", (("outcome", "hit"), ("tier", "disk"))] >= 2
    assert values["warmseed_refusals_total", (("reason", "expired"),)] >= 2
    assert values["warmseed_artifacts_total", (("kind", "compile_cache"), ("verdict", "used"))] >= 1
    assert values["warmseed_seconds_saved_total", (("kind", "compile_cache"),)] >= 12.5
    assert values["warmseed_engines_attached", (("group", "draft"), ("rank", "1"))] in (0, 1)
    phases = {sample.labels["phase"] for sample in families["warmseed_phase_seconds"].samples}
    assert phases == {"environment", "bundle", "load", "tables", "rehearsal", "release", "bind"}


def test_status_page_and_json_agree(tmp_path: Path) -> None:
    answers = visit(tmp_path, ["/status", "/status.json", "/", "/nothing"], model="/models/<script>alert(1)</script>")
    page = answers["/status"][1]
    record = json.loads(answers["/status.json"][1])
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert record["model"] == "/models/<script>alert(1)</script>"
    assert record["ranks"][0]["name"] == "target-0"
    assert record["ranks"][0]["serving"] is True
    assert record["ranks"][0]["phases"][0]["name"] == "environment"
    assert "target-0" in page
    assert "<h1>warmseed</h1>" in answers["/"][1]
    assert answers["/nothing"][0] == 404


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_pages_listen_on_the_asked_address_only(tmp_path: Path, host: str) -> None:
    port = free_port()
    reached: list[bool] = []

    def ready(_: Board) -> None:
        other = "127.0.0.2" if host == "127.0.0.1" else "127.0.0.1"
        for address in (host, other):
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
                reached.append(probe.connect_ex((address, port)) == 0)
        os.kill(os.getpid(), signal.SIGTERM)

    config = toy_config(tmp_path, weight_cache_health_port=port, weight_cache_health_host=host)
    assert asyncio.run(launch(config, rank_command=TOY, on_ready=ready)) == 143
    assert reached == [True, False]
