"""Folders of recordings (`.wav`), read as logarithmic mel spectrograms."""

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedloom.core.dataset import Dataset
from fedloom.core.errors import UserError
from fedloom.core.limits import refuse_without_room
from fedloom.core.reading import read_bytes
from fedloom.data.decode import OnBad, listed, reason
from fedloom.data.sources.tree import LabelledFiles, class_names, files_in, labelled_files, left_out, one_form

RECORDINGS = (".wav",)
SECONDS = 1.0
"""Default length of a recording."""
MELS = 32
"""Default number of frequency bands."""
WINDOW, HOP = 0.032, 0.016
"""Length of a frame and distance between frames, in seconds."""
FLOOR = 1e-6
"""Added to the power before the logarithm: −60 dB of a signal between −1 and 1."""
VIEWS = ("gaussian:0.1", "mask:0.2")
"""Default of `data.views`: a spectrogram that is mirrored or moved across frequencies is another sound."""
MOST = 2**28
"""Maximum size of a file, in bytes."""
RATES = (1000, 400_000)
"""Smallest and largest sample rate, in samples per second."""
FLAT = re.compile(r"(?P<label>[^_]+)_(?P<client>.+)_(?P<number>\d+)\.wav", re.IGNORECASE)


def read_recordings(
    root: Path, seconds: float | None = None, mels: int | None = None, on_bad: OnBad = "stop"
) -> Dataset:
    """Read recordings from class/file or client/class/file (below train/ and test/ or not), or flat files.

    Flat files are called `CLASS_CLIENT_NUMBER.wav`, all directly in the folder. Each recording becomes a spectrogram
    [1, mels, frames], see `spectrogram`. All must have the same sample rate.

    Args:
        root: The folder.
        seconds: Length; longer recordings are cut at the end, shorter ones are padded with silence. Default: 1.
        mels: Number of frequency bands. Default: 32.
        on_bad: `stop`: raise an error that names all files that cannot be read; `skip`: leave them out, with a note.

    Returns:
        The dataset, named after the folder.

    Raises:
        UserError: There are no recordings, names or folders are of another form, sample rates differ, or a file cannot
            be read.
    """
    files = files_in(root, RECORDINGS)
    if not files:
        raise UserError(f"{root}: there are no recordings in it (.wav)")
    return spectrograms(root, files, labelled_recordings(root, files), seconds, mels, on_bad)


def spectrograms(
    root: Path,
    files: Sequence[tuple[str, ...]],
    labels: LabelledFiles,
    seconds: float | None,
    mels: int | None,
    on_bad: OnBad = "stop",
) -> Dataset:
    """Read recordings whose labels are known."""
    seconds, mels = seconds or SECONDS, mels or MELS
    found, kept, longer = [], [], 0
    bad: dict[str, str] = {}
    rates: dict[int, Path] = {}
    for index, file in enumerate(files):
        path = root.joinpath(*file)
        try:
            sound = read_wav(path)
        except UserError as error:
            bad[str(path)] = str(error).removeprefix(f"{path}: ")
            continue
        rates.setdefault(sound.rate, path)
        if len(rates) > 1:
            (one, here), (other, there) = rates.items()
            raise UserError(
                f"{root}: recordings differ in sample rate: {here} has {one:,} samples per second, {there} "
                f"{other:,}; convert them to one rate"
            )
        longer += sound.seconds > seconds
        found.append(spectrogram(sound.samples, sound.rate, seconds, mels))
        if len(found) == 1:
            refuse_without_room(8 * found[0].numel() * len(files), f"data.seconds = {seconds:g}")
        kept.append(index)
    if bad and (on_bad == "stop" or not kept):
        raise UserError(
            f"{len(bad):,} of {len(files):,} recordings cannot be read; replace or remove them, or set data.on_bad = "
            f"skip: {listed(bad)}"
        )
    cut = f"{longer:,} of {len(kept):,} recordings are longer than {seconds:g} s and were cut (data.seconds)"
    notes = left_out(bad, len(files)) + ((cut,) if longer else ())
    dataset = labels.dataset(root.resolve().name, torch.stack(found), kept, notes)
    return replace(dataset, views=VIEWS)


def labelled_recordings(root: Path, files: Sequence[tuple[str, ...]]) -> LabelledFiles:
    """Take labels and clients from folders, or from names `CLASS_CLIENT_NUMBER.wav` of files in one folder.

    Raises:
        UserError: Folders or names have another form.
    """
    if any(len(file) > 1 for file in files):
        return labelled_files(root, files, what="recording")
    names = [FLAT.fullmatch(one_form(file[0])) for file in files]
    if None in names:
        wrong = files[names.index(None)][0]
        raise UserError(
            f"{root}: expected folders class/recording or client/class/recording, or files named "
            f"CLASS_CLIENT_NUMBER.wav, but there is {wrong}"
        )
    parts = [name.groupdict() for name in names if name]
    classes = class_names((part["label"] for part in parts), str(root))
    clients = tuple(sorted({part["client"] for part in parts}))
    return LabelledFiles(
        labels=[classes.index(part["label"]) for part in parts],
        classes=classes,
        test=[False] * len(parts),
        groups=[clients.index(part["client"]) for part in parts],
        group_names=clients,
    )


@dataclass(frozen=True)
class Sound:
    """The samples of a recording."""

    samples: np.ndarray
    """float32 [T] between −1 and 1; several channels are averaged."""
    rate: int
    """Samples per second."""

    @property
    def seconds(self) -> float:
        """Length."""
        return len(self.samples) / self.rate


def read_wav(path: Path) -> Sound:
    """Read a `.wav` file of integers or floats.

    Raises:
        UserError: The file is damaged, empty, too large, or has values that are not finite.
    """
    from scipy.io import wavfile

    data = read_bytes(path, "a recording", "save it again as a PCM .wav file", MOST)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", wavfile.WavFileWarning)  # chunks with text that is not needed
            # From memory: read from a file, scipy would allocate what the header declares.
            rate, values = wavfile.read(BytesIO(data))
    except (Exception, MemoryError) as error:
        raise UserError(f"{path}: cannot be read as a recording ({reason(path, error)})") from error
    if not RATES[0] <= rate <= RATES[1]:
        raise UserError(f"{path}: has {rate:,} samples per second; expected {RATES[0]:,} to {RATES[1]:,}")
    if values.size == 0 or values.ndim > 2:
        raise UserError(f"{path}: has no samples")
    with np.errstate(invalid="ignore"):  # signalling NaN, refused below
        samples = values.astype(np.float64)
    if values.dtype == np.uint8:  # 8-bit recordings are stored without sign
        samples = (samples - 128) / 128
    elif values.dtype.kind in "iu":
        samples /= 2.0 ** (8 * values.dtype.itemsize - 1)
    samples = samples if samples.ndim == 1 else samples.mean(1)
    if not (np.abs(samples) < 1e6).all():
        raise UserError(f"{path}: has values that are NaN, infinite or above 1,000,000; the range is −1 to 1")
    return Sound(samples.astype(np.float32), int(rate))


def spectrogram(samples: np.ndarray, rate: int, seconds: float, mels: int) -> Tensor:
    """Compute the logarithmic mel spectrogram of a recording.

    The signal is cut or padded with zeros at the end to `seconds`. Frames of 32 ms every 16 ms are multiplied by a Hann
    window; their power spectrum |X|² is summed with triangular filters, whose centres are equally spaced on the mel
    scale 2595·log10(1 + f/700) from 0 to half the sample rate, and log(10⁻⁶ + power) is the value of a band.

    Args:
        samples: [T].
        rate: Samples per second.
        seconds: Length of the result.
        mels: Number of bands.

    Returns:
        float32 [1, mels, frames].

    Raises:
        UserError: The recording is shorter than a frame, or there are more bands than frequencies.
    """
    wanted, window, hop = round(seconds * rate), round(WINDOW * rate), round(HOP * rate)
    if wanted < window:
        raise UserError(f"data.seconds = {seconds:g}: must be at least {WINDOW:g}, the length of a frame")
    signal = torch.zeros(wanted)
    part = torch.from_numpy(samples[:wanted])
    signal[: len(part)] = part
    points = 2 ** (2 * window - 1).bit_length()  # zero-padded, so that narrow filters contain a frequency
    frames = signal.unfold(0, window, hop) * torch.hann_window(window)
    power = torch.fft.rfft(frames, points).abs().square() / window
    return (power @ mel_filters(rate, points, mels).T + FLOOR).log().T[None].contiguous()


@cache
def mel_filters(rate: int, points: int, mels: int) -> Tensor:
    """Return triangular filters over the frequencies of a Fourier transform, float32 [mels, points // 2 + 1].

    Raises:
        UserError: A filter contains none of the frequencies.
    """
    edges = np.linspace(0, 2595 * np.log10(1 + rate / 2 / 700), mels + 2)
    edges = 700 * (10 ** (edges / 2595) - 1)
    frequencies = np.linspace(0, rate / 2, points // 2 + 1)
    rising = (frequencies - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - frequencies) / (edges[2:] - edges[1:-1])[:, None]
    filters = np.minimum(rising, falling).clip(0)
    if not filters.sum(1).all():
        raise UserError(f"data.mels = {mels}: are too many bands for {rate:,} samples per second; use fewer")
    return torch.from_numpy(filters.astype(np.float32))
