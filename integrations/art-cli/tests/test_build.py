"""The distributions of art-cli, which have the demo's example from another folder."""

import shutil
from pathlib import Path
from zipfile import ZipFile

import pytest
from hatchling import build

ROOT = Path(__file__).parents[1]


@pytest.mark.system
def test_a_wheel_of_the_sdist_is_the_wheel_of_the_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    direct = ZipFile(tmp_path / build.build_wheel(tmp_path)).namelist()
    shutil.unpack_archive(tmp_path / build.build_sdist(tmp_path), tmp_path)
    [unpacked] = tmp_path.glob("art_cli-*/")
    monkeypatch.chdir(unpacked)
    assert sorted(ZipFile(unpacked / build.build_wheel(unpacked)).namelist()) == sorted(direct)
    assert "art_cli/examples/email_search/train.py" in direct
