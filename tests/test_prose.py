"""Holds code and docs to plain words: phrases that readers stumbled over do not come back."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WORDS = [
    r"told", r"so many", r"whoever", r"goes? on", r"going on", r"(?<!there )is no (?!longer)\w+", r"befalls?",
    r"spoilt", r"in vain", r"of (?:its|their|his|our) own",
]  # fmt: skip
PHRASES = [
    "hangs on the host", "for everyone, also for who comes late", "whose turn it is", "would keep one from",
    "what is personal of", "take their training steps together", "one that is there", "the engine's to mend",
    "whatever an earlier", "rounded otherwise",
]  # fmt: skip
PATTERN = re.compile("|".join([*(rf"\b{word}\b" for word in WORDS), *map(re.escape, PHRASES)]), re.IGNORECASE)
ENDINGS = {".py", ".md", ".yaml", ".toml", ".txt", ".html", ".js", ".ipynb", ".cff"}
FOLDERS = ["fedloom", "docs", "benchmarks", "tests", "examples"]


def texts() -> list[Path]:
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in ENDINGS]
    return [*inside, *ROOT.glob("*.md"), *ROOT.glob("*.toml"), *ROOT.glob("*.cff")]


@pytest.mark.parametrize("folder", [*FOLDERS, "."])
def test_no_phrase_that_needs_a_second_reading(folder):
    found = []
    for path in texts():
        where = path.relative_to(ROOT)
        if (where.parts[0] if len(where.parts) > 1 else ".") != folder or path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            found += [f"{where}:{number}: {match[0]}" for match in PATTERN.finditer(line)]
    assert found == []


@pytest.mark.parametrize(
    "text", ["He was told.", "It is no run", "It goes on.", "a file of its own", "It hangs on the host"]
)
def test_the_pattern_finds_them(text):
    assert PATTERN.search(text)


@pytest.mark.parametrize(
    "text",
    [
        "the threshold is 3",
        "untold",
        "a totalling",
        "this node is nothing",
        "There is no test split",
        "it is no longer used",
    ],
)
def test_the_pattern_leaves_other_words(text):
    assert not PATTERN.search(text)
