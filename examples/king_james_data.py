"""The King James Bible as tokens, from Debian's packages bible-kjv and bible-kjv-text."""

import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from itertools import groupby

import numpy as np

VERSES = 31_102
TOKENS = {"train": 741_779, "valid": 39_065, "test": 39_942}
END, UNKNOWN = "<end>", "<unknown>"  # of a verse; a word outside of the vocabulary
_COMMAND = ("bible", "-f", "gen1:1-rev22:21")  # one verse a line: "Ge1:1 In the beginning ..."
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")
_REFERENCE = re.compile(r"([0-9A-Za-z]+:)[0-9]+ ")


class TextError(Exception):
    """The text is missing or another one; the message says what to do."""


@dataclass
class Corpus:
    """Token ids [n] i64 of each part, and the words by id; the last one is UNKNOWN."""

    words: list[str]
    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray


def read_verses() -> list[str]:
    """All verses in reading order, each behind its reference.

    Errors: TextError, one sentence that names the remedy.
    """
    remedy = "install Debian's packages bible-kjv and bible-kjv-text"
    try:
        done = subprocess.run(_COMMAND, capture_output=True, check=True, timeout=60)
    except FileNotFoundError:
        raise TextError(f"The King James text is read by the program bible, which is not here: {remedy}.") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise TextError(f"`{' '.join(_COMMAND)}` failed ({error}): {remedy}.") from error
    verses = done.stdout.decode("ascii", "replace").splitlines()
    if len(verses) != VERSES or not all(map(_REFERENCE.match, verses)):
        raise TextError(f"`{' '.join(_COMMAND)}` printed {len(verses):,} lines, not {VERSES:,} verses: {remedy}.")
    return verses


def split(verses: list[str]) -> dict[str, list[str]]:
    """Tokens of "train", "valid" and "test": lower-case words, and END after each verse.

    Of 20 chapters in reading order the tenth is for validation and the last for the test: whole books would be another
    kind of text.
    """
    parts: dict[str, list[str]] = {name: [] for name in TOKENS}
    for chapter, (_, lines) in enumerate(groupby(verses, lambda verse: _REFERENCE.match(verse)[1])):
        part = parts[{9: "valid", 19: "test"}.get(chapter % 20, "train")]
        for verse in lines:
            part += [*_WORD.findall(verse[_REFERENCE.match(verse).end() :].lower()), END]
    return parts


def vocabulary(tokens: list[str], size: int) -> list[str]:
    """The size - 1 most frequent tokens, of equally frequent ones the first by name; then UNKNOWN."""
    counts = Counter(tokens)
    return [*sorted(counts, key=lambda word: (-counts[word], word))[: size - 1], UNKNOWN]


def load(size: int) -> Corpus:
    """The text in a vocabulary of `size` words. Errors: TextError."""
    parts = split(read_verses())
    words = vocabulary(parts["train"], size)
    ids = {word: number for number, word in enumerate(words)}
    unknown = ids[UNKNOWN]
    return Corpus(
        words, **{name: np.array([ids.get(token, unknown) for token in tokens]) for name, tokens in parts.items()}
    )
