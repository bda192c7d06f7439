"""All problems of a table, of recordings or of an `.npz` file at once, for `fedloom data check`."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core.errors import UserError
from fedloom.data.check import check_folder
from fedloom.data.findings import EXAMPLES, DataCheck
from fedloom.data.frames import frame_problems
from fedloom.data.sources.npz import read_npz
from fedloom.data.sources.recordings import RATES, RECORDINGS, SECONDS, labelled_recordings, read_wav
from fedloom.data.sources.table import is_table, label_of, need_pyarrow, read_frame, table_files
from fedloom.data.sources.tree import files_in, pictures_in

Progress = Callable[[int, int], None]
SILENT = 1e-4
"""Recordings whose largest absolute value is below this are silent (−80 dB)."""


def check_path(
    path: Path, progress: Progress = lambda done, total: None, *, label: str | None = None, client: str | None = None
) -> DataCheck:
    """Check a folder of images or recordings, a table or a folder of tables, or an `.npz` file.

    Args:
        path: The file or folder.
        progress: Called with the number of files read so far and their total number.
        label: Column of the label of tables.
        client: Column of the client of tables.

    Returns:
        The findings, errors first.

    Raises:
        UserError: The path does not exist, or holds nothing that can be checked.

    Example:
        >>> check_path(Path("patients.csv")).number("error")   # doctest: +SKIP
        0
    """
    if not path.exists():
        raise UserError(f"'{path}': no such file or folder; name images, recordings, tables or an .npz file")
    if path.is_dir() and pictures_in(path):
        return check_folder(path, progress)
    if is_table(path):
        return check_tables(path, label, client, progress)
    if path.is_dir() and files_in(path, RECORDINGS):
        return check_recordings(path, progress)
    if path.suffix.lower() == ".npz":
        return check_arrays(path)
    raise UserError(f"'{path}': there is nothing to check in it; expected images, .wav, .csv, .parquet or .npz files")


def check_tables(
    path: Path, label: str | None, client: str | None, progress: Progress = lambda done, total: None
) -> DataCheck:
    """Check a table, or a folder with one table per client: columns, missing values, dates, classes, repeated rows."""
    import pandas

    files = table_files(path) if path.is_dir() else [path]
    if any(file.suffix.lower() == ".parquet" for file in files):
        need_pyarrow(path)  # that it is missing is not a problem of the files
    frames, bad = {}, {}
    for done, file in enumerate(files):
        progress(done, len(files))
        try:
            frames[file] = read_frame(file)
        except UserError as error:
            bad[file.name] = str(error).removeprefix(f"{file}: ")
    found = DataCheck(path, sum(map(len, frames.values())), "rows")
    text = "these files cannot be read: save them again"
    found.add("unreadable", "error", list(bad), text, "save it again", [f"{name} ({why})" for name, why in bad.items()])
    if not frames:
        return found.sort()
    first = next(iter(frames.values()))
    other = [file.name for file, frame in frames.items() if set(frame.columns) != set(first.columns)]
    found.add("other columns", "error", other, "all files must have the same columns", "give it the same columns")
    try:
        label = label_of(path, list(first.columns), label)
    except UserError as error:
        found.fact("label", str(error).removeprefix(f"{path}: "), "error")
        return found.sort()
    if client is not None and (client not in first.columns or client == label):
        found.fact("client", f"data.client = '{client}': is not another column", "error")
        client = None
    usable = {file: frame for file, frame in frames.items() if file.name not in other}
    whole = pandas.concat(list(usable.values()), ignore_index=True)
    for problem in frame_problems(whole, label, client):
        found.fact("columns", problem, "error")
    if client is not None:
        owners = _texts(whole[client])
    elif len(files) > 1 and sorted(file.stem for file in files) != ["test", "train"]:
        owners = [file.stem for file, frame in usable.items() for _ in range(len(frame))]
    else:
        owners = []
    labelled = np.flatnonzero(whole[label].notna())
    found.add_balance(_texts(whole[label].iloc[labelled]), [owners[row] for row in labelled] if owners else [])
    inputs = whole[[name for name in whole.columns if name != client]]
    hashes = pandas.util.hash_pandas_object(inputs.astype(str), index=False).tolist()
    _add_copies(found, hashes, [f"row {row + 1}" for row in range(len(whole))], owners, "rows")
    constant = [name for name in whole.columns if name not in (label, client) and whole[name].nunique() < 2]
    found.add("constant columns", "info", constant, "columns with one value tell nothing")
    roles = f"label '{label}'" + (f", client '{client}'" if client else "")
    found.fact("columns", f"{len(whole.columns):,} columns, {roles}")
    return found.sort()


def _texts(column: Any) -> list[str]:
    """Return the values of a column as texts; whole numbers without decimals."""
    return [f"{value:.0f}" if isinstance(value, float) and value.is_integer() else str(value) for value in column]


def check_recordings(root: Path, progress: Progress = lambda done, total: None) -> DataCheck:
    """Check a folder of recordings: readable, sample rates, lengths, silence, copies, classes and clients."""
    files = files_in(root, RECORDINGS)
    found = DataCheck(root, len(files), "recordings")
    names = ["/".join(file) for file in files]
    labels = None
    try:
        labels = labelled_recordings(root, files)
    except UserError as error:
        found.fact("names", str(error).removeprefix(f"{root}: "), "error")
    bad: dict[int, str] = {}
    rates, seconds, hashes, silent = {}, {}, {}, []
    for index, file in enumerate(files):
        progress(index, len(files))
        try:
            sound = read_wav(root.joinpath(*file))
        except UserError as error:
            bad[index] = str(error).removeprefix(f"{root.joinpath(*file)}: ")
            continue
        rates[index], seconds[index] = sound.rate, sound.seconds
        hashes[index] = sha256(sound.samples.tobytes()).hexdigest()
        if np.abs(sound.samples).max() < SILENT:
            silent.append(names[index])
    found.add(
        "unreadable", "error", [names[i] for i in bad], "replace or remove these files, or set data.on_bad = skip",
        "replace or remove it", [f"{names[i]} ({why})" for i, why in list(bad.items())[:EXAMPLES]],
    )  # fmt: skip
    usual = Counter(rates.values()).most_common(1)[0][0] if rates else RATES[0]
    found.add(
        "sample rates", "error", [names[i] for i, rate in rates.items() if rate != usual],
        f"most recordings have {usual:,} samples per second, these have others: a run refuses them",
        f"convert it to {usual:,} samples per second",
    )  # fmt: skip
    found.add("silent", "warning", silent, "recordings without sound: remove them", "remove it")
    if seconds:
        lengths = list(seconds.values())
        longer = sum(length > SECONDS for length in lengths)
        found.fact(
            "lengths",
            f"{min(lengths):.2f} to {max(lengths):.2f} s (median {np.median(lengths):.2f}) at {usual:,} samples per "
            f"second; {longer:,} are longer than {SECONDS:g} s and are cut unless data.seconds is set",
            "warning" if longer * 10 > len(lengths) else "info",
        )
    if labels is not None:
        good = list(rates)
        owners = [labels.group_names[labels.groups[i]] for i in good] if labels.group_names else []
        found.add_balance([labels.classes[labels.labels[i]] for i in good], owners)
        _add_copies(found, list(hashes.values()), [names[i] for i in good], owners, "recordings")
    return found.sort()


def check_arrays(path: Path) -> DataCheck:
    """Check an `.npz` file by reading it: the first thing that a run refuses, classes, clients, copies, values."""
    found = DataCheck(path, 0, "samples")
    try:
        dataset = read_npz(path)
    except UserError as error:
        found.fact("unreadable", str(error).removeprefix(f"{path}: "), "error")
        return found
    found.files = len(dataset)
    owners: list[str] = []
    if dataset.groups is not None:
        owners = [dataset.group_names[group] for group in dataset.groups.tolist()]
    found.add_balance([dataset.classes[label] for label in dataset.labels.tolist()], owners)
    low, high = float(dataset.inputs.min()), float(dataset.inputs.max())
    shape = "×".join(map(str, dataset.inputs.shape[1:]))
    found.fact("values", f"samples of {shape} values from {low:g} to {high:g}, kept as {dataset.inputs.numpy().dtype}")
    hashes = [sha256(sample.numpy().tobytes()).hexdigest() for sample in dataset.inputs]
    _add_copies(found, hashes, [f"sample {i}" for i in range(len(dataset))], owners, "samples")
    return found.sort()


def _add_copies(
    found: DataCheck, hashes: Sequence[object], names: Sequence[str], owners: Sequence[str], what: str
) -> None:
    """Add findings about samples that are equal, at several clients or at one."""
    places = defaultdict(list)
    for place, value in enumerate(hashes):
        places[value].append(place)
    groups = [group for group in places.values() if len(group) > 1]
    across = [group for group in groups if owners and len({owners[i] for i in group}) > 1]
    within = [group for group in groups if not owners or len({owners[i] for i in group}) == 1]
    for check, chosen, advice in (
        ("copies across clients", across, f"the same {what} at several clients: keep each at one"),
        ("copies", within, "copies can come into the training and the test part of a client: keep one of each"),
    ):
        shown = [" = ".join(names[i] for i in group[:2]) for group in chosen[:EXAMPLES]]
        found.add(
            check, "warning", [names[i] for group in chosen for i in group], f"{len(chosen):,} groups; {advice}",
            "keep one of each group", shown,
        )  # fmt: skip
