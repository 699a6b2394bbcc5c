"""The deployment examples are what they claim: their tools accept them, and they name what exists."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate
import promql_parser
import pytest
import yaml

from warmseed.daemon.launcher.board import Board, RankState
from warmseed.daemon.pages.metrics import Exposition
from warmseed.daemon.placement import groups_of, layout_of
from warmseed.daemon.protocol.status import EngineAttached, Metrics, Phase, Refused, Serving, TierCounts, Used
from warmseed.daemon.settings.config import PreloadConfig, options
from warmseed.daemon.settings.merge import read_file

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
UNITS = sorted((CONFIGS / "systemd").glob("*.service"))
MANIFESTS = sorted((CONFIGS / "kubernetes").glob("*.yaml"))
OUR_FLAGS = {option.flag for option in options().values()} | {
    "--seed-source-host",
    "--seed-source-port",
    "--config",
}


def exported_metrics() -> dict[str, set[str]]:
    """Every metric a launcher with something to tell exports, with its labels."""
    rank = RankState("target-0", "target", 0, 0, pid=1)
    for message in (
        Phase("rehearsal"),
        Serving("/s"),
        EngineAttached(1),
        Used("compile_cache", used=True, seconds_saved=1.0),
        Refused({"expired": 1}),
        Metrics((TierCounts("disk"),), weights_bytes=1, released_bytes=1),
    ):
        rank.take(message, 0)
    board = Board([rank])
    board.ready_after, board.rehearsal_outcome = 1.0, "ok"
    found: dict[str, set[str]] = {}
    for line in Exposition(board).render()[0].decode().splitlines():
        if not line.startswith("#"):
            name, labels = re.fullmatch(r"(\w+)(?:\{(.*)\})? \S+", line).groups()  # type: ignore[union-attr]
            found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels or ""))
    return found


def names_in(expression: str) -> tuple[set[str], set[str]]:
    """Metric names and label names in a PromQL expression that the parser accepts."""
    promql_parser.parse(expression)
    bare = re.sub(r'"[^"]*"', "", expression)
    metrics = set(re.findall(r"\b(?:warmseed|process|up)_?\w*\b", bare))
    labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", re.sub(r"==|>=|<=", " ", bare)))
    for group in re.findall(r"by \(([^)]*)\)", bare):
        labels |= {part.strip() for part in group.split(",")}
    return metrics, labels


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_accepts_the_unit(unit: Path, tmp_path: Path) -> None:
    for source in UNITS:
        # The programs of the example are not installed here; everything else is checked as it is.
        text = re.sub(r"^ExecStart=/opt/warmseed/bin/warmseed", "ExecStart=/bin/true", source.read_text(), flags=re.M)
        (tmp_path / source.name).write_text(text)
    instance = unit.name.replace("@", "@model")
    (tmp_path / instance).symlink_to(unit.name)
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(tmp_path / instance)],
        env={"SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert unit.name not in result.stderr
    assert instance not in result.stderr


def test_unit_fits_the_launchers_protocol() -> None:
    text = (CONFIGS / "systemd" / "warmseed@.service").read_text()
    command = next(line for line in text.splitlines() if line.startswith("ExecStart="))
    assert {word for word in shlex.split(command) if word.startswith("--")} <= OUR_FLAGS
    for setting in ("Type=notify", "KillMode=mixed", "RestartPreventExitStatus=2", "WatchdogSec="):
        assert setting in text
    engine = (CONFIGS / "systemd" / "vllm@.service").read_text()
    assert "BindsTo=warmseed@%i.service" in engine
    assert "After=warmseed@%i.service" in engine


def documents() -> Iterator[tuple[str, dict[str, object]]]:
    for path in MANIFESTS:
        for document in yaml.safe_load_all(path.read_text()):
            yield f"{path.name}:{document['kind']}", document


@pytest.mark.parametrize("document", [pytest.param(document, id=name) for name, document in documents()])
def test_kubernetes_accepts_the_manifest(document: dict[str, object]) -> None:
    kubernetes_validate.validate(document, "1.34", strict=True)


def containers() -> Iterator[dict[str, list[str]]]:
    for _, document in documents():
        pod = document.get("spec", {}).get("template", {}).get("spec", {})  # type: ignore[attr-defined]
        yield from itertools.chain(pod.get("initContainers", []), pod.get("containers", []))


def test_manifests_start_daemons_with_flags_that_exist_and_work() -> None:
    daemons = [c for c in containers() if c["command"][:2] == ["warmseed", "preload"]]
    assert len(daemons) == 2
    for container in daemons:
        given = dict(word.split("=", 1) for word in container["args"])
        assert set(given) <= OUR_FLAGS
        config = PreloadConfig(
            model=given["--model"],
            tensor_parallel_size=int(given["--tensor-parallel-size"]),
            weight_cache_health_port=int(given["--weight-cache-health-port"]),
        )
        groups_of(config, layout_of(config))
        for probe in ("startupProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["path"] == "/health"  # type: ignore[call-overload]


def test_engines_and_daemons_of_a_manifest_share_what_they_must() -> None:
    for path in MANIFESTS:
        pods = [
            document["spec"]["template"]["spec"]
            for document in yaml.safe_load_all(path.read_text())
            if "template" in document.get("spec", {}) and "containers" in document["spec"]["template"]["spec"]
        ]
        one_pod = len(pods) == 1
        for pod in pods:
            assert pod.get("shareProcessNamespace") if one_pod else pod["hostPID"] and pod["hostIPC"]
        mounts = [
            {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            for pod in pods
            for container in [*pod.get("initContainers", []), *pod["containers"]]
            if container["command"][0] == "warmseed"
        ]
        assert len(mounts) == 2
        for name in ["sockets", "cache", *(["shm"] if one_pod else [])]:
            assert len({mount[name] for mount in mounts}) == 1


def test_example_configuration_is_valid() -> None:
    found = read_file(CONFIGS / "warmseed.toml")
    assert found["tensor_parallel_size"] == 4
    assert found["seed_sources"] == ["10.0.0.11:29600", "10.0.0.12:29600"]


def alerts() -> list[dict[str, object]]:
    groups = yaml.safe_load((CONFIGS / "prometheus" / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_alert_asks_for_metrics_and_labels_that_exist(rule: dict[str, object]) -> None:
    known = exported_metrics()
    metrics, labels = names_in(str(rule["expr"]))
    assert metrics
    assert metrics <= set(known)
    assert labels <= {"instance", "job"}.union(*(known[name] for name in metrics))
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert {"summary", "description"} == set(rule["annotations"])  # type: ignore[call-overload]


def test_scrape_configuration_names_the_rules_beside_it() -> None:
    config = yaml.safe_load((CONFIGS / "prometheus" / "prometheus.yml").read_text())
    for name in config["rule_files"]:
        assert (CONFIGS / "prometheus" / name).exists()
    assert [job["job_name"] for job in config["scrape_configs"]] == ["warmseed", "warmseed-pods"]


def test_dashboard_asks_for_metrics_and_labels_that_exist() -> None:
    dashboard = json.loads((CONFIGS / "grafana" / "warmseed.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    known = exported_metrics()
    for panel in panels:
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "5m")
            metrics, labels = names_in(expression)
            assert metrics <= set(known), panel["title"]
            assert labels <= {"instance"}.union(*(known[name] for name in metrics)), panel["title"]
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= {"instance"} | labels


def test_documentation_names_the_metrics_that_exist() -> None:
    text = (CONFIGS.parent / "docs" / "launcher.md").read_text()
    assert set(re.findall(r"`(warmseed_\w+)`", text)) == {
        name
        for name in exported_metrics()
        if name.startswith("warmseed_")
        and name not in ("warmseed_build_info", "warmseed_ranks")
        and not name.endswith("_created")
    }


def test_no_two_panels_overlap() -> None:
    panels = json.loads((CONFIGS / "grafana" / "warmseed.json").read_text())["panels"]
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        mine = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not mine & cells
        cells |= mine
