"""The King James text as tokens, and a short training on it; without Debian's packages most of it is skipped."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

king_james_data = importlib.import_module("king_james_data")
needs_text = pytest.mark.skipif(shutil.which("bible") is None, reason="needs Debian's bible-kjv and bible-kjv-text")


@needs_text
@pytest.mark.parametrize(("size", "unknown"), [(4000, (2.52, 3.20)), (10_000, (0.31, 1.08))])
def test_counts(size: int, unknown: tuple[float, float]) -> None:
    corpus = king_james_data.load(size)
    assert {name: len(getattr(corpus, name)) for name in king_james_data.TOKENS} == king_james_data.TOKENS
    assert len(corpus.words) == len(set(corpus.words)) == size
    assert corpus.words[:4] == ["the", "and", "of", king_james_data.END] and corpus.words[-1] == king_james_data.UNKNOWN
    for part, percent in zip((corpus.train, corpus.valid), unknown, strict=True):
        assert 100 * (part == size - 1).mean() == pytest.approx(percent, abs=0.01)
    first = [corpus.words[number] for number in corpus.train[:11]]
    assert " ".join(first) == "in the beginning god created the heaven and the earth <end>"


def test_split_and_vocabulary() -> None:
    verses = [f"Ge{chapter}:{verse} And Aaron's rod, {chapter}" for chapter in range(1, 22) for verse in (1, 2)]
    parts = king_james_data.split(verses)
    assert parts["valid"] == parts["test"] == ["and", "aaron's", "rod", king_james_data.END] * 2
    assert len(parts["train"]) == 19 * 8
    assert king_james_data.vocabulary(["b", "a", "c", "c"], 3) == ["c", "a", king_james_data.UNKNOWN]


def test_missing_or_wrong_text_names_the_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(king_james_data.TextError, match="install Debian's packages bible-kjv and bible-kjv-text"):
        king_james_data.load(100)
    program = tmp_path / "bible"
    for script, words in (("echo Ge1:1 In the beginning", "printed 1 lines, not 31,102 verses"), ("exit 3", "failed")):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        with pytest.raises(king_james_data.TextError, match=words) as caught:
            king_james_data.load(100)
        assert "install Debian's packages" in str(caught.value) and "\n" not in str(caught.value)


def word_lm(ranks: int, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command += [str(EXAMPLES / "word_lm.py"), "--smoke", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


@needs_text
def test_short_training_with_two_ranks(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    done = word_lm(2, "--method", "dense", "top_k", "--vocabulary", "500", "--width", "64", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    dense, top_k = json.loads(out.read_text())
    parameters = 500 * 64 + 2 * (2 * 4 * 64 * 64 + 2 * 4 * 64) + 500
    for run in (dense, top_k):
        assert (run["ranks"], run["parameters"], run["vocabulary"], run["steps"]) == (2, parameters, 500, 30)
        assert run["loss_curve"][0] == pytest.approx(6.2, abs=0.1) and run["loss_curve"][-1] < 5.9
        assert 50 < run["test_perplexity"] < 400
    # the same for as long as both are dense: clipping apart, which is of the mean in one and of the shares in the other
    assert dense["loss_curve"][0] == pytest.approx(top_k["loss_curve"][0], abs=1e-4)
    assert top_k["density_sent"] == pytest.approx(0.01, rel=0.01)
    assert top_k["bytes_sent_per_step"] < 0.1 * top_k["dense_bytes_per_step"]


@needs_text
def test_streams_that_ranks_cannot_share() -> None:
    done = word_lm(3, "--method", "dense")
    assert done.returncode != 0 and "20 streams cannot be shared evenly by 3 ranks" in done.stderr
