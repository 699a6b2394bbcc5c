"""A plugin that waits for a module's import instead of importing it."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from warmseed.daemon.engines.vllm.post_import import when_imported

NAME = "warmseed_imported_later"


@pytest.fixture
def module_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / f"{NAME}.py"
    path.write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield path
    sys.modules.pop(NAME, None)


def test_nothing_is_imported_until_somebody_does(module_file: Path) -> None:
    seen: list[ModuleType] = []
    when_imported(NAME, seen.append)
    assert seen == []
    assert NAME not in sys.modules
    module = importlib.import_module(NAME)
    assert seen == [module]
    assert module.VALUE == 1


def test_a_module_that_is_there_already_is_told_at_once(module_file: Path) -> None:
    module = importlib.import_module(NAME)
    seen: list[ModuleType] = []
    when_imported(NAME, seen.append)
    assert seen == [module]


def test_the_module_keeps_its_own_loader(module_file: Path) -> None:
    when_imported(NAME, lambda module: None)
    module = importlib.import_module(NAME)
    assert module.__spec__ is not None
    assert type(module.__spec__.loader).__module__.startswith(("_frozen_importlib", "importlib"))
    assert module.__loader__ is module.__spec__.loader
    assert module.__spec__.loader.get_source(NAME) == "VALUE = 1\n"  # type: ignore[union-attr]


def test_a_callback_that_fails_does_not_break_the_import(module_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(module: ModuleType) -> None:
        raise RuntimeError("not our module")

    when_imported(NAME, fail)
    with caplog.at_level(logging.ERROR):
        assert importlib.import_module(NAME).VALUE == 1
    assert "ipc_cache" in caplog.text


def test_a_module_that_fails_to_import_still_fails_by_itself(module_file: Path) -> None:
    module_file.write_text("raise ValueError('broken')\n")
    when_imported(NAME, lambda module: None)
    with pytest.raises(ValueError, match="broken"):
        importlib.import_module(NAME)
