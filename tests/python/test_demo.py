"""What the demo makes of its runs, without running it; `make test` runs a short one beside this."""

import gzip
import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

demo, demo_report, fashion_mnist_data = map(importlib.import_module, ("demo", "demo_report", "fashion_mnist_data"))


def run(method: str, accuracy: float, sent: float, compress_ms: float = 0.0) -> dict:
    return {
        "method": method,
        "density": 1.0 if method == "dense" else 0.001,
        "ranks": 4,
        "seed": 1,
        "parameters": 813_258,
        "steps": 300,
        "dense_steps": 300 if method == "dense" else 100,
        "test_accuracy": accuracy,
        "bytes_sent_per_step": sent,
        "dense_bytes_per_step": 4_879_548.0,
        "buckets": 0 if method == "dense" else 2,
        "compress_ms": compress_ms,
        "compute_ms": 20.0,
        "accuracy_curve": [[150, accuracy - 5], [300, accuracy]],
        "loss_curve": [2.3 * 0.99**step for step in range(300)],
    }


@pytest.fixture
def runs() -> list[dict]:
    return [
        run("dense", 90.7, 4_879_548.0),
        run("redsync", 90.4, 145_310.0, 2.5),
        run("dragonn", 89.8, 150_134.0, 4.0),
        run("no error feedback", 89.0, 145_310.0, 2.5),
    ]


def test_computed_step_times(runs: list[dict]) -> None:
    rows = demo_report.results(runs)
    dense, redsync = rows[0]["computed_step_ms"], rows[1]["computed_step_ms"]
    # compute 20 ms; 2 buckets, 6 and 3 rounds of 50 µs; 8 bits a byte at 10^8 and 10^10 bit/s
    assert dense["100 Mbit/s"] == pytest.approx(20 + 0.6 + 390.36384)
    assert redsync["100 Mbit/s"] == pytest.approx(20 + 2.5 + 0.3 + 11.6248)
    assert redsync["10 Gbit/s"] == pytest.approx(20 + 2.5 + 0.3 + 0.116248)
    assert not any(key.endswith("_curve") for row in rows for key in row)


def test_table_and_report(runs: list[dict], tmp_path: Path) -> None:
    rows = demo_report.results(runs)
    lines = demo_report.table(rows).split("\n")
    assert len({len(line) for line in lines}) == 1
    assert " ".join(lines[4].split()) == "RedSync 90.40 % 145.3 kB 2.98 % 2.50 ms 34.4 ms 24.0 ms 22.9 ms"
    images = demo_report.plot(runs, tmp_path)
    assert [image.name for image in images] == ["loss.png", "accuracy.png"]
    demo_report.write_report(tmp_path / "report.html", rows, images, demo.check(rows, smoke=False), "here & now")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 2 and "here &amp; now" in page
    assert "http" not in page and 'src="/' not in page


def test_checks_tell_what_did_not_hold(runs: list[dict]) -> None:
    held = [ok for _, ok in demo.check(demo_report.results(runs), smoke=False)]
    assert held == [True, True, True, True]
    runs[1]["test_accuracy"] = 89.69
    runs[2]["bytes_sent_per_step"] = 155_001.0
    runs[3]["test_accuracy"] = 89.21
    assert [ok for _, ok in demo.check(demo_report.results(runs), smoke=False)] == [False, False, True, False]
    assert len(demo.check(demo_report.results(runs), smoke=True)) == 1


def write_idx(path: Path, array: np.ndarray) -> None:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(gzip.compress(header + array.tobytes()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for part, count in (("train", 6), ("t10k", 3)):
        pixels = np.arange(count * 28 * 28, dtype=np.uint32).astype(np.uint8).reshape(count, 28, 28)
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", pixels)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", np.arange(count, dtype=np.uint8))
    return tmp_path


def test_data_set_is_read(folder: Path) -> None:
    pixels, labels = fashion_mnist_data.load(fashion_mnist_data.locate(folder), "test")
    assert pixels.shape == (3, 28, 28) and pixels[0, 1, 2] == 30 and labels.tolist() == [0, 1, 2]


def test_missing_data_set_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fashion_mnist_data, "DEBIAN_FOLDER", tmp_path / "debian")
    monkeypatch.setattr(fashion_mnist_data, "DOWNLOAD_FOLDER", tmp_path / "download")
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    with pytest.raises(fashion_mnist_data.DatasetError, match="install Debian's package dataset-fashion-mnist"):
        fashion_mnist_data.locate()
    monkeypatch.setattr(sys, "argv", ["demo.py", "--data", str(tmp_path), "--out", str(tmp_path / "out")])
    assert demo.main() == 1
    message = capsys.readouterr().err
    assert message.startswith("demo: ") and "dataset-fashion-mnist" in message and message.count("\n") == 1


@pytest.mark.parametrize("content", [b"", b"no gzip", gzip.compress(b"\0\0\x08\1\0\0\0\5abc"), gzip.compress(b"")])
def test_damaged_data_set_is_refused(folder: Path, content: bytes) -> None:
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(content)
    with pytest.raises(fashion_mnist_data.DatasetError, match="t10k-labels-idx1-ubyte"):
        fashion_mnist_data.load(folder, "test")
