"""The table of docs/reference/deploy.md lists every file that `fedloom deploy init` writes, with its mode."""

import os
import re
import shutil
import stat
from pathlib import Path

import pytest
from federated import NAMES, make_federation, small_recipe

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "deploy.md"


def rows() -> list[tuple[list[str], str, str, str]]:
    """The patterns of the files, the mode, who needs them and whether they are secret, of each row of the table."""
    section = PAGE.read_text(encoding="utf-8").partition("writes\n")[2].partition("\n## ")[0]
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| `")
    ]
    return [(re.findall("`([^`]+)`", files), mode, who, secret) for files, mode, who, secret, _ in cells]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[dict[str, int], dict[str, int]]:
    """The modes of the files and of the folders that init writes, by their paths."""
    folder = tmp_path_factory.mktemp("init") / "fed"
    before = os.umask(0o022)
    try:
        make_federation(folder, small_recipe("fedavg"))
    finally:
        os.umask(before)
    shutil.rmtree(folder / "data")  # images of the tests
    modes = {path.relative_to(folder).as_posix(): path.stat().st_mode for path in (folder, *folder.rglob("*"))}
    files, folders = (
        {path: stat.S_IMODE(mode) for path, mode in modes.items() if kind(mode)}
        for kind in (stat.S_ISREG, stat.S_ISDIR)
    )
    return files, folders


def matches(pattern: str, path: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace("NAME", f"({'|'.join(NAMES)})"), path) is not None


def test_each_file_that_init_writes_has_one_row_with_its_mode(written):
    patterns = [(pattern, mode) for files, mode, _, _ in rows() for pattern in files]
    files = {path: f"{mode:04o}" for path, mode in written[0].items()}
    assert {path: [mode for pattern, mode in patterns if matches(pattern, path)] for path in files} == {
        path: [mode] for path, mode in files.items()
    }
    assert [pattern for pattern, _ in patterns if not any(matches(pattern, path) for path in files)] == []


def test_secret_files_are_those_that_only_their_owner_can_read():
    assert {(mode == "0600", secret) for _, mode, _, secret in rows()} == {(True, "yes"), (False, "no")}


def test_each_file_is_in_the_folder_of_the_party_that_needs_it():
    folders = {"server": "server/", "NAME": "organisations/NAME/", "the person who renews certificates": "ca.key"}
    for files, _, who, _ in rows():
        assert all(file.startswith(folders[who]) for file in files), files


def test_only_its_owner_can_enter_the_folder_of_a_party(written):
    closed = {path for path, mode in written[1].items() if mode == 0o700}
    assert closed == {".", "server", *(f"organisations/{name}" for name in NAMES)}
