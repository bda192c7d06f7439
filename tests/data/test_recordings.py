"""Recordings as data: the spectrogram, lengths, names of files, damaged files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import wavfile

from fedloom.core.errors import UserError
from fedloom.data import load
from fedloom.data.check_files import check_path
from fedloom.data.sources.recordings import mel_filters, read_wav, spectrogram

RATE = 8000


def tone(hertz: float, seconds: float = 0.5, rate: int = RATE) -> np.ndarray:
    return np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


def write(path: Path, samples: np.ndarray, rate: int = RATE, kind: Any = np.int16) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    top = {np.int16: 32767, np.int32: 2**31 - 1, np.float32: 1}.get(kind)
    wavfile.write(path, rate, (samples * 127 + 128 if kind == np.uint8 else samples * top).astype(kind))


@pytest.mark.parametrize("kind", [np.int16, np.int32, np.float32, np.uint8])
def test_samples_are_between_minus_1_and_1_whatever_their_type(tmp_path: Path, kind: Any) -> None:
    write(tmp_path / "a.wav", tone(440), kind=kind)
    sound = read_wav(tmp_path / "a.wav")
    assert (sound.rate, sound.seconds) == (RATE, 0.5)
    assert np.allclose(sound.samples, tone(440), atol=0.02)
    stereo = np.stack([tone(440), -tone(440)], axis=1).astype(np.float32)
    wavfile.write(tmp_path / "b.wav", RATE, stereo)
    assert np.abs(read_wav(tmp_path / "b.wav").samples).max() == 0


def test_a_tone_is_loudest_in_the_band_around_its_frequency() -> None:
    filters = mel_filters(RATE, 512, 32)
    for hertz in (200, 1000, 3000):
        image = spectrogram(tone(hertz, 1.0).astype(np.float32), RATE, 1.0, 32)
        assert image.shape == (1, 32, 61)
        band = int(filters[:, round(hertz / RATE * 512)].argmax())
        assert (image[0].argmax(0) - band).abs().max() <= 1


def test_the_spectrogram_is_the_documented_transform() -> None:
    samples = np.random.default_rng(0).normal(size=8000).astype(np.float32)
    image = spectrogram(samples, RATE, 1.0, 16)[0].numpy()
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(256) / 256)
    frame = samples[128 * 5 : 128 * 5 + 256] * window
    power = np.abs(np.fft.rfft(frame, 512)) ** 2 / 256
    assert np.allclose(image[:, 5], np.log(mel_filters(RATE, 512, 16).numpy() @ power + 1e-6), atol=1e-3)


def test_recordings_are_padded_and_cut(tmp_path: Path) -> None:
    write(tmp_path / "x/low/1.wav", tone(300, 0.5))
    write(tmp_path / "x/high/1.wav", tone(2000, 1.5))
    dataset = load("x", folder=tmp_path)
    assert dataset.inputs.shape == (2, 1, 32, 61) and dataset.inputs.dtype == torch.float32
    assert dataset.classes == ("high", "low") and dataset.groups is None
    assert dataset.notes == ("1 of 2 recordings are longer than 1 s and were cut (data.seconds)",)
    assert float(dataset.inputs[1, 0, :, -1].max()) == pytest.approx(np.log(1e-6), abs=1e-3)
    assert load("x", folder=tmp_path, seconds=2.0, mels=20).inputs.shape == (2, 1, 20, 124)


def test_clients_come_from_folders_or_from_names(tmp_path: Path) -> None:
    for name in ("bern/low/1", "bern/high/1", "oslo/low/1"):
        write(tmp_path / f"x/{name}.wav", tone(300))
    for name in ("low_bern_0", "high_bern_0", "low_oslo_b_7"):
        write(tmp_path / f"y/{name}.wav", tone(300))
    folders, names = load("x", folder=tmp_path), load("y", folder=tmp_path)
    assert folders.group_names == ("bern", "oslo") and names.group_names == ("bern", "oslo_b")
    assert folders.classes == names.classes == ("high", "low")
    write(tmp_path / "y/other.wav", tone(300))
    with pytest.raises(UserError, match=r"files named CLASS_CLIENT_NUMBER\.wav, but there is other\.wav"):
        load("y", folder=tmp_path)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "x/a/1.wav", tone(300))
    write(tmp_path / "x/b/1.wav", tone(300, rate=16000), rate=16000)
    with pytest.raises(UserError, match=r"differ in sample rate: .*a/1\.wav has 8,000 .*b/1\.wav 16,000"):
        load("x", folder=tmp_path)
    (tmp_path / "x/b/1.wav").write_bytes(b"RIFF0000WAVEjunk")
    (tmp_path / "x/b/2.wav").write_bytes(b"")
    with pytest.raises(UserError, match=r"2 of 3 recordings cannot be read; .*data\.on_bad = skip: .*b/1\.wav"):
        load("x", folder=tmp_path)
    kept = load("x", folder=tmp_path, on_bad="skip")
    assert len(kept) == 1 and "2 of 3 files cannot be read and are left out" in kept.notes[0]
    with pytest.raises(UserError, match=r"data\.mels = 256: are too many bands for 8,000 samples per second"):
        load("x", folder=tmp_path, on_bad="skip", mels=256)
    with pytest.raises(UserError, match=r"data\.seconds = 0\.01: must be at least 0\.032"):
        load("x", folder=tmp_path, on_bad="skip", seconds=0.01)
    wavfile.write(tmp_path / "x/b/1.wav", RATE, np.array([0, np.nan], np.float32))
    with pytest.raises(UserError, match=r"b/1\.wav \(has values that are NaN"):
        load("x", folder=tmp_path)


def test_recordings_are_checked_at_once(tmp_path: Path) -> None:
    for speaker in ("ann", "bob"):
        for digit in "01":
            for number in range(3):
                sound = tone(100 * (1 + number) + 50 * int(digit), 0.3) * (0.5 if speaker == "ann" else 1)
                write(tmp_path / f"x/{digit}_{speaker}_{number}.wav", sound)
    assert check_path(tmp_path / "x").number("error") == check_path(tmp_path / "x").number("warning") == 0
    write(tmp_path / "x/0_bob_3.wav", tone(150) * 0)
    write(tmp_path / "x/0_bob_4.wav", tone(100, 0.3) * 0.5)
    write(tmp_path / "x/0_bob_5.wav", tone(100, rate=4000), rate=4000)
    (tmp_path / "x/1_bob_9.wav").write_bytes(b"hello")
    found = {finding.check: finding for finding in check_path(tmp_path / "x").findings}
    assert found["unreadable"].examples[0].startswith("1_bob_9.wav (cannot be read as a recording")
    assert found["sample rates"].examples == ("0_bob_5.wav",)
    assert found["silent"].examples == ("0_bob_3.wav",)
    assert found["copies across clients"].examples == ("0_ann_0.wav = 0_bob_4.wav",)
    assert "at 8,000 samples per second" in found["lengths"].text
