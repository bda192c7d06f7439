"""Omniglot: handwritten characters of 50 alphabets, each drawn by twenty people."""

import zipfile
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path

import torch
from PIL import Image

from fedloom.core.dataset import Dataset
from fedloom.core.errors import UserError
from fedloom.core.reading import decoding
from fedloom.data.decode import decode, open_picture
from fedloom.data.sources.source import ReadOptions, Source
from fedloom.data.sources.tree import files_in, left_out, one_form

PARTS = ("images_background", "images_evaluation")
SMALLER = ("images_background_small1", "images_background_small2")
"""The authors' two smaller sets, of five alphabets each."""
SIDE = 28
"""Height and width unless `data.size` is set; the original is 105."""
MOST = 2**20
"""Maximum size of one picture in an archive, in bytes; they have about 300."""
REMEDY = "download it again"

Member = tuple[str, ...]


class Omniglot(Source):
    """Omniglot in `omniglot/`: `images_background` and `images_evaluation`, as folders or zip files.

    With both parts there are 1,623 classes, with the background part alone 964, with the smaller parts fewer. Classes
    are alphabet/character; natural clients are the drawers 01 to 20. Drawers are numbered within an alphabet. There is
    no official test set. Pictures are resized to 28×28 (or `data.size`); ink is 0, paper 255.
    """

    name = "omniglot"
    description = "Omniglot: 32,460 characters of 50 alphabets by 20 drawers, 28×28 grey"
    count = 1623
    layouts = tuple((f"omniglot/{part}{end}",) for part in (*PARTS, *SMALLER) for end in ("", ".zip"))
    command = (
        "curl --create-dirs --output-dir {folder}/omniglot -O -L "
        "'https://github.com/brendenlake/omniglot/raw/master/python/images_{{background,evaluation}}.zip'"
    )

    def read(self, folder: Path, size: int | None) -> Dataset:
        """Read all parts that are in the folder."""
        return self.read_files(folder, ReadOptions(size=size))

    def read_files(self, folder: Path, options: ReadOptions) -> Dataset:
        """Read all parts that are in the folder; with `skip`, leave out pictures that cannot be read."""
        root = folder / "omniglot"
        full = any((root / f"{part}{end}").exists() for part in PARTS for end in ("", ".zip"))
        with ExitStack() as stack:
            found = [file for part in (PARTS if full else SMALLER) for file in _files(root, part, stack)]
            files = list({file.place: file for file in found}.values())  # the smaller parts share alphabets
            if not files:
                raise UserError(f"{root}: there are no pictures alphabet/character/number_drawer.png; {REMEDY}")
            places = [file.place for file in files]
            decoded = decode(
                [file.name for file in files],
                lambda index: files[index].open(),
                options.size or SIDE,
                on_bad=options.on_bad,
                hint=", or set data.on_bad = skip",
            )
        kept = [places[index] for index in decoded.kept]
        classes = tuple(sorted({f"{alphabet}/{character}" for alphabet, character, _ in places}))
        drawers = tuple(sorted({drawer for _, _, drawer in places}))
        label_of = {name: label for label, name in enumerate(classes)}
        return Dataset(
            name=self.name,
            inputs=decoded.images,
            labels=torch.tensor([label_of[f"{alphabet}/{character}"] for alphabet, character, _ in kept]),
            test=torch.zeros(len(kept), dtype=torch.bool),
            classes=classes,
            groups=torch.tensor([drawers.index(drawer) for _, _, drawer in kept]),
            group_names=drawers,
            notes=left_out(decoded.bad, len(files)),
        )


class _File:
    """A picture in a folder or an archive."""

    def __init__(self, parts: Member, source: Path, archive: zipfile.ZipFile | None = None):
        self.parts, self.source, self.archive = parts, source, archive
        self.name = f"{source}/{'/'.join(parts)}"

    @property
    def place(self) -> tuple[str, str, str]:
        """Alphabet, character, drawer."""
        alphabet, character, file = map(one_form, self.parts[-3:])
        return alphabet, character, file.rpartition(".")[0].rpartition("_")[2]

    def open(self) -> Image.Image:
        """Open the picture, reading only its header (in an archive, the file)."""
        if self.archive is None:
            return open_picture(self.source.joinpath(*self.parts))
        info = self.archive.getinfo("/".join(self.parts))
        if info.file_size > MOST:
            raise ValueError(f"has more than {MOST:,} bytes")
        return open_picture(BytesIO(self.archive.read(info)))


def _files(root: Path, part: str, stack: ExitStack) -> list[_File]:
    """Return the pictures of one part, from its folder or its archive, opened until the stack is closed."""
    if (root / part).is_dir():
        found = [_File(file, root / part) for file in files_in(root / part, (".png",))]
    elif (path := root / f"{part}.zip").is_file():
        with decoding(path, "a zip file", REMEDY):
            archive = stack.enter_context(zipfile.ZipFile(path))
            names = sorted(info.filename for info in archive.infolist() if info.filename.lower().endswith(".png"))
        found = [_File(tuple(name.split("/")), path, archive) for name in names]
    else:
        return []
    return [file for file in found if len(file.parts) >= 3 and file.place[2].isdigit()]
