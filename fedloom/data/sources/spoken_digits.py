"""Spoken digits: recordings of six speakers (Free Spoken Digit Dataset)."""

from dataclasses import replace
from pathlib import Path

from fedloom.core.dataset import Dataset
from fedloom.core.errors import UserError
from fedloom.data.sources.recordings import FLAT, RECORDINGS, labelled_recordings, spectrograms
from fedloom.data.sources.source import ReadOptions, Source
from fedloom.data.sources.tree import files_in

TEST = 5
"""Recordings of a speaker and digit with a number below this are the official test set."""


class SpokenDigits(Source):
    """The Free Spoken Digit Dataset in `free-spoken-digit-dataset/recordings/{digit}_{speaker}_{number}.wav`.

    3,000 recordings at 8 kHz, as spectrograms (see `fedloom.data.sources.recordings`). Natural clients are the six
    speakers. The official test set are the recordings 0 to 4 of each speaker and digit.
    """

    name = "spoken-digits"
    description = "Spoken digits: 3,000 recordings of 6 speakers, as spectrograms (Free Spoken Digit Dataset)"
    classes = tuple("0123456789")
    layouts = (("free-spoken-digit-dataset/recordings",),)
    command = "git clone https://github.com/Jakobovski/free-spoken-digit-dataset {folder}/free-spoken-digit-dataset"
    inputs = "recordings"
    takes = ("seconds", "mels")

    def read(self, folder: Path, size: int | None) -> Dataset:
        """Read the recordings."""
        return self.read_files(folder, ReadOptions())

    def read_files(self, folder: Path, options: ReadOptions) -> Dataset:
        """Read the recordings with a length and a number of bands; with `skip`, leave out those that are damaged."""
        root = folder / self.layouts[0][0]
        files = files_in(root, RECORDINGS)
        if not files:
            raise UserError(f"{root}: there are no recordings in it (.wav); download them again")
        labels = labelled_recordings(root, files)
        if strange := set(labels.classes) - set(self.classes):
            raise UserError(f"{root}: '{min(strange)}' is not a digit; files are called DIGIT_SPEAKER_NUMBER.wav")
        numbers = [int(found["number"]) if (found := FLAT.fullmatch(file[-1])) else TEST for file in files]
        labels = replace(
            labels,
            labels=[int(labels.classes[label]) for label in labels.labels],
            classes=self.classes,
            test=[number < TEST for number in numbers],
        )
        dataset = spectrograms(root, files, labels, options.seconds, options.mels, options.on_bad)
        return replace(dataset, name=self.name)
