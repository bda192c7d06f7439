"""All problems of a folder of images at once, for `fedloom data check`."""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedloom.core.errors import UserError
from fedloom.data.findings import EXAMPLES, DataCheck, Fix, Severity
from fedloom.data.near_duplicates import near_duplicates
from fedloom.data.scan import FLOAT, Scan, scan
from fedloom.data.sources.tree import PICTURES, one_form, pictures_in, same_but_for_case


@dataclass(frozen=True)
class _Place:
    """Where a picture stands: its path, and what its folders say about it."""

    path: str
    label: str
    """Class; empty for a misplaced file."""
    client: str
    split: str
    """`train` or `test`; empty if the folder has no such folders."""


def check_folder(root: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> DataCheck:
    """Check a folder of class folders, or of client folders of class folders, optionally below train/ and test/.

    Every picture is decoded once (JPEG files at a small scale), and about a hundred bytes of each are kept. Pictures of
    two clients, or of train/ and test/, are compared by their difference hash (`fedloom.data.near_duplicates`).

    Args:
        root: The folder.
        progress: Called with the number of files read so far and their total number.

    Returns:
        The findings, errors first.

    Raises:
        UserError: The folder does not exist or has no pictures.

    Example:
        >>> found = check_folder(Path("shops"))   # doctest: +SKIP
        >>> found.number("error")   # doctest: +SKIP
        0
    """
    if not root.is_dir():
        raise UserError(f"'{root}': no such folder; name a folder of class folders, or of clients' folders of them")
    files = pictures_in(root)
    if not files:
        raise UserError(f"'{root}': there are no pictures in it ({', '.join(sorted(PICTURES))})")
    found = DataCheck(root, len(files))
    checker = _Checker(found, files)
    checker.folders(root)
    total = len(files)
    checker.pictures(scan([root.joinpath(*file) for file in files], lambda done: progress(done, total)))
    return found.sort()


class _Checker:
    def __init__(self, found: DataCheck, files: list[tuple[str, ...]]):
        self.found = found
        is_split = {file[0] for file in files} == {"train", "test"}
        inner = [file[1:] if is_split else file for file in files]
        depths = Counter(len(file) for file in inner)
        self.depth = max((2, 3), key=lambda depth: depths[depth])
        self.misplaced = ["/".join(file) for file, rest in zip(files, inner, strict=True) if len(rest) != self.depth]
        self.levels = self.depth - 1 + is_split
        self.raw = [rest[:-1] for rest in inner if len(rest) == self.depth]
        self.places = [
            _Place(
                "/".join(file),
                one_form(rest[-2]) if len(rest) == self.depth else "",
                one_form(rest[0]) if self.depth == 3 and len(rest) == 3 else "",
                file[0] if is_split else "",
            )
            for file, rest in zip(files, inner, strict=True)
        ]

    def folders(self, root: Path) -> None:
        """Check the names and places of folders and files."""
        expected = "client/class/picture" if self.depth == 3 else "class/picture"
        self.found.add(
            "misplaced files", "error", self.misplaced,
            f"most files are {expected}, these are not: move or remove them",
            f"move it to a place like {expected}, or remove it",
        )  # fmt: skip
        empty, others = _other_content(root, self.levels)
        self.found.add(
            "empty folders", "warning", empty,
            "class or client folders without pictures are ignored: fill or remove them",
            "add pictures, or remove the folder",
        )  # fmt: skip
        self.found.add("other files", "info", others, "files without the ending of a picture are ignored")
        for level, what in ((-1, "classes"), (0, "clients")) if self.depth == 3 else ((-1, "classes"),):
            names = sorted({folders[level] for folders in self.raw})
            forms = defaultdict(list)
            for name in names:
                forms[one_form(name)].append(name)
            double = [f"{len(same)} forms of '{form}'" for form, same in forms.items() if len(same) > 1]
            self.found.add(
                f"{what} in several Unicode forms", "warning", double,
                f"these {what} are read as one, because they look the same: give the folders one name",
            )  # fmt: skip
            confused = [" / ".join(group) for group in same_but_for_case(forms)]
            self.found.add(
                f"{what} that differ by case", "error" if what == "classes" else "warning", confused,
                "merge the folders, or rename one" + (": a run refuses them" if what == "classes" else ""),
                "merge the folders, or rename one",
            )  # fmt: skip

    def pictures(self, facts: Scan) -> None:
        """Check the content of the files."""
        bad = sorted(facts.bad)
        self.found.add(
            "unreadable", "error", [self.places[i].path for i in bad],
            "replace or remove these files, or set data.on_bad = skip",
            examples=[f"{self.places[i].path} ({facts.bad[i]})" for i in bad[:EXAMPLES]],
        )  # fmt: skip
        self.found.fixes += [Fix(self.places[i].path, "unreadable", f"replace or remove ({facts.bad[i]})") for i in bad]
        good = np.setdiff1d(np.arange(len(self.places)), bad)
        self._depths(facts, good)
        turned = [self.places[i].path for i in good[facts.turned[good]]]
        self.found.add("EXIF orientation", "info", turned, "pictures are turned upright when they are read")
        if len(good):
            self._sizes(facts.sizes[good])
        self._balance(good)
        self._duplicates(facts, good)

    def _depths(self, facts: Scan, good: np.ndarray) -> None:
        depths = facts.depths[good]
        deep = (depths == FLOAT) | (depths >= 16)
        kinds = ", ".join(
            f"{n:,} with {'floats' if d == FLOAT else f'{d} bits'}"
            for d, n in sorted(Counter(depths[depths != 8].tolist()).items())
        )
        grey = deep & facts.grey[good]
        if grey.any() and not grey.all():
            few = grey if grey.sum() * 2 <= len(grey) else ~grey
            self.found.add(
                "mixed depths", "error", [self.places[i].path for i in good[few]],
                f"{kinds}: a run refuses grey values of more than 8 bits beside others; save all with the same depth",
                "save it with the depth of the others",
            )  # fmt: skip
            return
        deeper = [self.places[i].path for i in good[grey]]
        self.found.add("bit depth", "info", deeper, f"{kinds}: grey values are kept as floats, scaled to 0 to 1")
        self.found.add(
            "bit depth", "warning", [self.places[i].path for i in good[(depths != 8) & ~grey]],
            f"{kinds}: values are converted to 8 bits, of 16 bits the upper 8", "save it with 8 bits per channel",
        )  # fmt: skip

    def _sizes(self, sizes: np.ndarray) -> None:
        distinct = len(np.unique(sizes, axis=0))
        low, high = sizes.min(0).tolist(), sizes.max(0).tolist()
        middle = np.median(sizes, axis=0).astype(int).tolist()
        self.found.sizes = {"min": low, "median": middle, "max": high, "distinct": distinct}
        if distinct == 1:
            self.found.fact("sizes", f"all pictures have {low[0]}×{low[1]} pixels")
            return
        text = f"{distinct:,} sizes: width {low[0]} to {high[0]} (median {middle[0]}), height {low[1]} to {high[1]} "
        self.found.fact("sizes", f"{text}(median {middle[1]}); set data.size to resize them", "warning")

    def _balance(self, good: np.ndarray) -> None:
        placed = [self.places[i] for i in good if self.places[i].label]
        clients = [place.client for place in placed] if self.depth == 3 else []
        self.found.add_balance([place.label for place in placed], clients)

    def _duplicates(self, facts: Scan, good: np.ndarray) -> None:
        """Sort groups of near-duplicates by what is wrong with them; a group can have several problems."""
        kinds: dict[str, list[list[_Place]]] = defaultdict(list)
        good = np.array([i for i in good if self.places[i].label], np.int64)
        for group in near_duplicates(facts.thumbnails[good]):
            places = [self.places[i] for i in good[group]]
            clients, splits, labels = ({getattr(p, name) for p in places} for name in ("client", "split", "label"))
            for name, distinct in (
                ("across clients", clients),
                ("in train and test", splits),
                ("across classes", labels),
            ):
                if len(distinct) > 1:
                    kinds[name].append(places)
            if max(len(clients), len(splits), len(labels)) == 1:
                kinds["within a class"].append(places)
        advice: dict[str, tuple[Severity, str, str]] = {
            "across clients": (
                "warning",
                "the same picture at several clients: keep it at one",
                "keep it at one client",
            ),
            "in train and test": (
                "warning",
                "test accuracy is too high: remove them from train/",
                "remove it from train/",
            ),
            "across classes": (
                "warning",
                "the same picture in several classes: decide for one",
                "decide for one class",
            ),
            "within a class": (
                "info" if self.places[0].split else "warning",
                "copies can come into the training and the test part of a client: keep one of each",
                "keep one of each group",
            ),
        }
        for name, (severity, text, action) in advice.items():
            groups = kinds[name]
            paths = [place.path for places in groups for place in places]
            shown = [" = ".join(place.path for place in _different(places, name)) for places in groups[:EXAMPLES]]
            check = f"near-duplicates {name}"
            self.found.add(check, severity, paths, f"{len(groups):,} groups; {text}", examples=shown)
            if severity != "info":
                self.found.fixes += [
                    Fix(place.path, check, f"{action}; group: {_short(places)}")
                    for places in groups
                    for place in places
                ]


def _different(places: list[_Place], name: str) -> Iterator[_Place]:
    """Yield two pictures of a group that differ in what the finding is about."""
    by = {"across clients": "client", "in train and test": "split", "across classes": "label"}.get(name, "path")
    yield places[0]
    yield next(place for place in places if getattr(place, by) != getattr(places[0], by))


def _short(places: list[_Place]) -> str:
    """Name the first pictures of a group."""
    return ", ".join(place.path for place in places[:4]) + (", …" if len(places) > 4 else "")


def _other_content(root: Path, levels: int) -> tuple[list[str], list[str]]:
    """Return the folders without pictures down to the class folders, and the files that are not pictures."""
    empty, others = [], []
    full: set[str] = set()
    for place, folders, files in os.walk(root, topdown=True, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        parts = Path(place).relative_to(root).parts
        visible = sorted(name for name in files if not name.startswith("."))
        strange = [name for name in visible if Path(name).suffix.lower() not in PICTURES]
        others += ["/".join((*parts, name)) for name in strange]
        if len(strange) < len(visible):
            full.update("/".join(parts[:end]) for end in range(len(parts) + 1))
        if parts and len(parts) <= levels:
            empty.append("/".join(parts))
    without = {name for name in empty if name not in full}
    return sorted(name for name in without if name.rpartition("/")[0] not in without), others
