"""Image folders: one folder per class, optionally within one folder per client or style."""

import os
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fedloom.core.dataset import Dataset
from fedloom.core.errors import UserError
from fedloom.data import hub
from fedloom.data.decode import OnBad, decode, listed, open_picture
from fedloom.data.sources.source import ReadOptions, Source

PICTURES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}


def read_tree(
    root: Path,
    size: int | None,
    train: Collection[str] = ("train",),
    test: Collection[str] = ("test",),
    on_bad: OnBad = "stop",
) -> Dataset:
    """Read images from class/picture or client/class/picture, optionally all below train/ and test/.

    Clients (or styles) become the groups of the dataset. If the top folders are exactly those named in `train` and
    `test`, they are the official split. Hidden files and files without an image extension are skipped. Folder names
    that differ only by their Unicode form (as between macOS and Linux) are the same class or client.

    Args:
        root: The folder.
        size: Height and width to which images are resized; required if their sizes differ.
        train: Top folders of training data.
        test: Top folders of the official test set.
        on_bad: `stop`: raise an error that names all files that cannot be read; `skip`: leave them out, with a note.

    Returns:
        The dataset, named after the folder.

    Raises:
        UserError: There are no images, the depth of folders differs, names of classes differ only by case, or an image
            cannot be read.
    """
    files = pictures_in(root)
    if not files:
        raise UserError(f"{root}: there are no pictures in it ({', '.join(sorted(PICTURES))})")
    found = labelled_files(root, files, train, test)
    paths = [str(root.joinpath(*file)) for file in files]
    hint = ", or set data.on_bad = skip"
    decoded = decode(paths, lambda index: open_picture(paths[index]), size, on_bad=on_bad, hint=hint)
    notes = (decoded.note,) if decoded.note else ()
    return found.dataset(root.resolve().name, decoded.images, decoded.kept, left_out(decoded.bad, len(files)) + notes)


def left_out(bad: Mapping[str, str], count: int) -> tuple[str, ...]:
    """Return the note about files that were left out, if there are any."""
    text = f"{len(bad):,} of {count:,} files cannot be read and are left out (data.on_bad = skip): "
    return (text + listed(bad),) if bad else ()


@dataclass(frozen=True)
class LabelledFiles:
    """Class, client and part of files, as their folders say."""

    labels: list[int]
    classes: tuple[str, ...]
    test: list[bool]
    groups: list[int]
    """Empty if the files have no clients."""
    group_names: tuple[str, ...] = ()

    def dataset(self, name: str, inputs: torch.Tensor, kept: Sequence[int], notes: tuple[str, ...]) -> Dataset:
        """Return the dataset of the files that were kept, with their inputs."""
        return Dataset(
            name=name,
            inputs=inputs,
            labels=torch.tensor([self.labels[index] for index in kept]),
            test=torch.tensor([self.test[index] for index in kept]),
            classes=self.classes,
            groups=torch.tensor([self.groups[index] for index in kept]) if self.group_names else None,
            group_names=self.group_names,
            notes=notes,
        )


def labelled_files(
    root: Path,
    files: Sequence[tuple[str, ...]],
    train: Collection[str] = ("train",),
    test: Collection[str] = ("test",),
    what: str = "picture",
) -> LabelledFiles:
    """Take labels and clients from paths: class/file or client/class/file, optionally all below train/ and test/.

    Raises:
        UserError: The depth of folders differs, or names of classes differ only by case.
    """
    is_split = {file[0] for file in files} == {*train, *test}
    inner = [tuple(map(one_form, file[1:] if is_split else file)) for file in files]
    depths = {len(file) for file in inner}
    if len(depths) > 1 or not depths <= {2, 3}:
        shallow, deep = min(files, key=len), max(files, key=len)
        raise UserError(
            f"{root}: expected class/{what} or client/class/{what} for all files, "
            f"but there are {'/'.join(shallow)} and {'/'.join(deep)}"
        )
    classes = class_names((file[-2] for file in inner), str(root))
    group_names = tuple(sorted({file[0] for file in inner})) if depths == {3} else ()
    label_of = {name: label for label, name in enumerate(classes)}
    group_of = {name: group for group, name in enumerate(group_names)}
    return LabelledFiles(
        labels=[label_of[file[-2]] for file in inner],
        classes=classes,
        test=[is_split and file[0] in test for file in files],
        groups=[group_of[file[0]] for file in inner] if group_names else [],
        group_names=group_names,
    )


def one_form(name: str) -> str:
    """Return a folder's name in Unicode's composed form (NFC): macOS often writes é as two characters."""
    return unicodedata.normalize("NFC", name)


def same_but_for_case(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the groups of different names that differ only by case, sorted."""
    found: dict[str, set[str]] = {}
    for name in names:
        found.setdefault(name.lower(), set()).add(name)
    return sorted(tuple(sorted(group)) for group in found.values() if len(group) > 1)


def class_names(folders: Iterable[str], where: str) -> tuple[str, ...]:
    """Return the class names of folders: in one Unicode form, sorted.

    Args:
        folders: Names of class folders; repeated names are one class.
        where: The folder or flag, for the error message.

    Raises:
        UserError: Names differ only by case: some file systems do not distinguish them.
    """
    names = {one_form(folder) for folder in folders}
    if confused := same_but_for_case(names):
        first, second = confused[0][:2]
        raise UserError(
            f"{where}: the class folders '{first}' and '{second}' differ only by case; move the pictures into one "
            "folder or, if they are two classes, rename one (for example, to 'small a')"
        )
    return tuple(sorted(names))


class _Tree(Source):
    root: str
    train: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    styles = False

    def read(self, folder: Path, size: int | None) -> Dataset:
        """Read the images."""
        return self.read_files(folder, ReadOptions(size=size))

    def read_files(self, folder: Path, options: ReadOptions) -> Dataset:
        """Read the images; with `on_bad: skip`, leave out those that cannot be read."""
        found = read_tree(folder / self.root, options.size, self.train, self.test, options.on_bad)
        return replace(found, name=self.name, styles=self.styles)


class Cinic10(_Tree):
    """CINIC-10 in `cinic10/{train,valid,test}`; the validation part is used as training data."""

    name = "cinic10"
    description = "CINIC-10: 270,000 colour pictures of 32×32, CIFAR-10's classes from CIFAR-10 and ImageNet"
    count = 10
    root = "cinic10"
    train, test = ("train", "valid"), ("test",)
    layouts = (("cinic10/train", "cinic10/valid", "cinic10/test"),)
    command = (
        "mkdir -p {folder}/cinic10 && curl -L "
        "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz | tar xz -C {folder}/cinic10"
    )
    remote = hub.Table("flwrlabs/cinic10", train=("train", "validation"))


class OfficeHome(_Tree):
    """Office-Home in `OfficeHomeDataset_10072016/`: four styles, no official test set."""

    name = "office-home"
    description = "Office-Home: 15,588 pictures of 65 classes of objects in 4 styles, of various sizes (set data.size)"
    count = 65
    root = "OfficeHomeDataset_10072016"
    styles = True
    layouts = (tuple(f"OfficeHomeDataset_10072016/{s}" for s in ("Art", "Clipart", "Product", "Real World")),)
    command = "pip install 'fedloom[hub]' (it is then downloaded from the Hugging Face hub)"
    remote = hub.Table("flwrlabs/office-home", group="domain", test=())


class Adaptiope(_Tree):
    """Adaptiope in `Adaptiope/`: three styles, no official test set."""

    name = "adaptiope"
    description = "Adaptiope: 36,900 pictures of 123 classes of objects in 3 styles, of various sizes (set data.size)"
    count = 123
    root = "Adaptiope"
    styles = True
    layouts = (tuple(f"Adaptiope/{s}" for s in ("synthetic", "product_images", "real_life")),)
    command = "unzip Adaptiope.zip -d {folder} (the archive that https://gitlab.com/tringwald/adaptiope links to)"


def pictures_in(root: Path) -> list[tuple[str, ...]]:
    """Return the paths, as tuples of parts, of all files below a folder with an image extension that are not hidden."""
    return files_in(root, PICTURES)


def files_in(root: Path, endings: Collection[str]) -> list[tuple[str, ...]]:
    """Return the paths, as tuples of parts, of all files below a folder with these endings that are not hidden."""
    found = []
    for folder, inner, files in os.walk(root, followlinks=True):
        inner[:] = [name for name in inner if not name.startswith(".")]
        parts = Path(folder).relative_to(root).parts
        found += [(*parts, file) for file in files if not file.startswith(".") and Path(file).suffix.lower() in endings]
    return sorted(found)
