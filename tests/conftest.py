"""The same start for every test, and CI's wish that every test runs."""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterator

import pytest

from tests.support.services import redis_server, s3_server


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="fail a test that is skipped: here everything can run")


def pytest_configure() -> None:
    # A runner under nohup leaves it ignored, which the launcher respects.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.config.getoption("--no-skips"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, which --no-skips forbids: {report.longrepr}"
    return report


@pytest.fixture(scope="module")
def redis_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a real Redis server, empty at first."""
    with redis_server(tmp_path_factory.mktemp("redis")) as port:
        yield port


@pytest.fixture(scope="module")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real S3 API, without buckets at first."""
    with s3_server(tmp_path_factory.mktemp("s3")) as endpoint:
        yield endpoint
