"""The end-to-end benchmark: a short run on a real lab, and what the report makes of measurements."""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
STATE = Path("/run/thinwire-netlab")
sys.path.insert(0, str(BENCH))

end_to_end, end_to_end_report = map(importlib.import_module, ("end_to_end", "end_to_end_report"))
network = importlib.import_module("lab.network")


def lab_is_possible() -> bool:
    """Root of a container may not be allowed to make namespaces."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        return False
    try:
        with network.Lab([1e9]):
            return True
    except network.LabError:
        return False


needs_lab = pytest.mark.skipif(not lab_is_possible(), reason="needs iproute2 and the right to make network namespaces")


def start(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, str(BENCH / "end_to_end.py"), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and output of one run."""
    folder = tmp_path_factory.mktemp("quick")
    process = start("--quick", "--out", str(folder))
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, output + errors
    assert not list(STATE.glob(f"*-{process.pid}-*"))
    return folder, output


@needs_lab
def test_quick_run_counts_what_the_links_carried(quick: tuple[Path, str]) -> None:
    folder, output = quick
    dense, redsync = json.loads((folder / "results.json").read_text())
    assert (dense["method"], redsync["method"], redsync["density"]) == ("dense", "redsync", 0.001)
    for row in (dense, redsync):
        assert (row["model"], row["hosts"], row["rate_mbit"], row["repetitions"]) == ("M1", 2, 1000, 1)
        assert row["steps"] == [8] and row["parameters"] == end_to_end.PARAMETERS["M1"]
        assert row["replicas_equal"] is True and row["loss_finite"] is True
        assert 0 < row["step_ms_min"] == row["step_ms"] == row["step_ms_max"] and row["cpu_ms_per_step"] > 0
    headers = 1514 / 1448  # of a full frame; acknowledgements come on top
    payload = 2 * 1 / 2 * 4 * dense["parameters"]
    assert dense["dense_bytes_per_step"] == payload and dense["stats_bytes_per_step"] is None
    assert headers * payload <= dense["interface_bytes_per_step"] <= 1.05 * headers * payload
    payload = redsync["stats_bytes_per_step"]
    assert headers * payload <= redsync["interface_bytes_per_step"] <= 1.05 * headers * payload + 2000
    assert dense["step_ms"] >= 8 * headers * dense["dense_bytes_per_step"] / 1e6 * 0.98  # 1 Gbit/s, a bucket for free
    assert set(redsync["stages_ms"]) == {"select", "encode", "exchange", "decode", "exposed_wait"}
    assert all(value > 0 for value in redsync["stages_ms"].values())
    assert output.count("min left") == 2
    assert "| thinwire redsync 0.1 % |" in (folder / "table.md").read_text(encoding="utf-8")
    assert all((folder / name).stat().st_size > 5000 for name in ("speedup.png", "step_time.png"))


@needs_lab
def test_what_is_there_is_not_measured_again(quick: tuple[Path, str]) -> None:
    folder, _ = quick
    before = (folder / "runs.jsonl").read_bytes()
    begin = time.monotonic()
    process = start("--quick", "--out", str(folder))
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "min left" not in output and time.monotonic() - begin < 30
    assert (folder / "runs.jsonl").read_bytes() == before


@needs_lab
def test_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    process = start("--quick", "--out", str(tmp_path))
    deadline = time.monotonic() + 20
    while not (found := list(STATE.glob(f"*-{process.pid}-*"))):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and "start it again to go on" in errors and "Traceback" not in errors
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not found[0].exists() and f"tw{found[0].name.split('-')[0]}-" not in names


def measured(method: str, step_ms: float, density: float = 1.0, **changes: object) -> dict:
    thinwire = method in end_to_end.THINWIRE
    return {
        "model": "M1",
        "hosts": 4,
        "rate_mbit": 100.0,
        "method": method,
        "density": density,
        "options": {},
        "thinwire": "0.1.0+0" if thinwire else None,
        "parameters": 1_000_000,
        "steps": 10,
        "step_ms": step_ms,
        "interface_bytes_per_step": 25_000.0 if thinwire else 6_300_000.0,
        "stats_bytes_per_step": 24_000.0 if thinwire else None,
        "stages_ms": {"select": 2.0, "encode": 1.0, "exchange": 6.0, "decode": 1.0, "exposed_wait": 9.0}
        if thinwire
        else None,
        "cpu_ms_per_step": 10.0,
        "replicas_equal": None if method == "none" else True,
        "loss": 2.3,
    } | changes


@pytest.fixture
def runs() -> list[dict]:
    steps = {"none": (20.0, 19.0, 24.0), "dense": (520.0, 540.0, 500.0), "top_k": (45.0, 40.0, 100.0)}
    return [
        measured(method, value, 0.001 if method == "top_k" else 1.0, rate_mbit=rate)
        for rate in (100.0, 1000.0)
        for method, values in steps.items()
        for value in values
    ]


def test_rows_are_medians_with_speed_up_and_headroom(runs: list[dict]) -> None:
    rows = end_to_end_report.results(runs)
    assert len(rows) == 6
    row = next(row for row in rows if row["method"] == "top_k")
    assert (row["step_ms"], row["step_ms_min"], row["step_ms_max"], row["repetitions"]) == (45.0, 40.0, 100.0, 3)
    assert row["speedup"] == pytest.approx(520 / 45, abs=1e-3)
    assert row["headroom_closed"] == pytest.approx((520 - 45) / (520 - 20), abs=1e-4)
    assert row["dense_bytes_per_step"] == 6_000_000
    text = end_to_end_report.table(rows)
    assert "| thinwire top_k 0.1 % | 11.56×, 95 % | 11.56×, 95 % |" in text
    assert "| thinwire top_k 0.1 % | 45.0 (40.0–100.0) | 45.0 (40.0–100.0) |" in text
    assert "| dense f32 (plain DDP) | 6,300.0 kB | 6,300.0 kB |" in text
    assert "Not to be trusted" not in text


def test_a_broken_method_is_named(runs: list[dict]) -> None:
    runs.append(measured("bf16", 5.0, replicas_equal=False))
    runs.append(measured("powersgd", 5.0, loss=None))
    text = end_to_end_report.table(end_to_end_report.results(runs))
    assert "- bf16 (DDP's hook) on 4×100 Mbit/s: the replicas differ\n" in text
    assert "- PowerSGD rank 1 (DDP's hook) on 4×100 Mbit/s: the loss is not finite\n" in text


@pytest.mark.parametrize(("step_ms", "scale", "rest"), [(45.0, 1.0, 15.0), (25.0, 0.5, 0.0)])
def test_bars_add_up_to_the_step(step_ms: float, scale: float, rest: float) -> None:
    rows = end_to_end_report.results([measured("none", 20.0), measured("top_k", step_ms, 0.001)])
    parts = end_to_end_report.bar(next(row for row in rows if row["method"] == "top_k"))
    assert list(parts) == list(end_to_end_report.PARTS) and sum(parts.values()) == pytest.approx(step_ms)
    assert list(parts.values()) == pytest.approx([20.0, *(scale * value for value in (2, 1, 6, 1)), rest])


def test_pictures_of_a_part_of_the_cells(runs: list[dict], tmp_path: Path) -> None:
    del runs[3:6]  # no dense at the first rate
    end_to_end_report.write([*runs, measured("bf16", 300.0, model="M2")], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "table.md", "speedup.png", "step_time.png"}


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    assert end_to_end.read_runs(file) == []
    file.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert end_to_end.read_runs(file) == [{"a": 1}, {"a": 2}]
    assert file.read_text() == '{"a": 1}\n{"a": 2}\n'


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--networks", "4x100"], "rate '100' is not a number with kbit, mbit or gbit"),
        (["--networks", "1x1gbit"], "network '1x1gbit' is not a number of hosts, at least 2, and a rate"),
        (["--methods", "fast"], "there is no method 'fast', but none, dense"),
        (["--methods", "redsync@much"], "density 'much' of redsync is not a number"),
        (["--methods", "dense@0.1"], "method 'dense' takes no density"),
        (["--methods", "top_k@2"], "density 2 of top_k is not in (0, 1]"),
        (["--methods", "top_k@nan"], "density nan of top_k is not in (0, 1]"),
        (["--options", "dense_below"], "option 'dense_below' is not NAME=EXPRESSION"),
        (["--report", "--out", "/nowhere/at/all"], "nothing was measured in /nowhere/at/all"),
    ],
)
def test_bad_input_gives_one_sentence(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["end_to_end.py", *arguments])
    assert end_to_end.main() == 1
    errors = capsys.readouterr().err
    assert errors.startswith(f"end_to_end: {words}") and errors.count("\n") == 1
