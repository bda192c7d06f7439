import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedloom.data.sources.idx import FashionMnist


@pytest.fixture(autouse=True)
def _no_data_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(FashionMnist, "also", ())


@pytest.fixture
def write_idx() -> Callable[[Path, np.ndarray], None]:
    def write(path: Path, array: np.ndarray) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
        content = header + array.astype(np.uint8).tobytes()
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)

    return write


@pytest.fixture
def write_picture() -> Callable[..., None]:
    def write(path: Path, value: int | tuple[int, ...], size: tuple[int, int] = (6, 4), mode: str = "RGB") -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, size, value).save(path)

    return write
