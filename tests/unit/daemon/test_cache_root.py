"""The folder from which compiled code is loaded belongs to this user alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from warmseed.daemon.settings.paths import default_cache_root, prepare_cache_root, state_folder
from warmseed.errors import ConfigurationError


def test_it_is_made_private_with_warmseeds_own_folder_in_it(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    prepare_cache_root(root)
    prepare_cache_root(root)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert stat.S_IMODE(state_folder(root).stat().st_mode) == 0o700


def test_it_is_the_same_path_on_every_node_of_a_fleet() -> None:
    assert default_cache_root() == Path(f"/var/tmp/warmseed-{os.getuid()}")


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(ConfigurationError, match="chmod 700"):
        prepare_cache_root(root)
    assert list(root.iterdir()) == []


def test_a_folder_that_others_may_only_read_will_do(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(0o755)
    prepare_cache_root(root)


def test_a_link_is_refused_wherever_it_leads(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigurationError, match="nor may it be a link"):
        prepare_cache_root(tmp_path / "link")


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("")
    with pytest.raises(ConfigurationError, match="name another folder"):
        prepare_cache_root(tmp_path / "root")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_another_users_folder_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    os.chown(root, 65534, 65534)
    with pytest.raises(ConfigurationError, match="belongs to user 65534"):
        prepare_cache_root(root)
