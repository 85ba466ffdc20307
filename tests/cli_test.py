"""cli_test.py PROGRAM: the command line tool measures what it has verified, and refuses bad input in a sentence."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

STAGES = {"filter", "select", "fused_step", "update_only", "encode", "decode"}
FIELDS = {"stage", "selector", "numel", "density", "distribution", "threads", "p50_ms", "read_pass_ratio", "verified"}


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=120, check=False)


def npy(path: Path, values: list[float], dtype: str = "<f4") -> Path:
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({len(values)},), }}\n".encode()
    packed = struct.pack(f"<{len(values)}{'f' if dtype == '<f4' else 'd'}", *values)
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + packed)
    return path


def check_rows(program: str, folder: Path) -> None:
    out = folder / "rows.json"
    done = run(
        program, "bench", "--numel", "50000", "300Ki", "--threads", "1", "2", "--repetitions", "3", "--json", str(out)
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    assert {row["stage"] for row in rows} == STAGES
    assert {row["numel"] for row in rows} == {50_000, 307_200}
    assert {row["threads"] for row in rows} == {1, 2}
    for row in rows:
        assert row.keys() >= FIELDS, row
        assert row["verified"] is True, row
        assert 0 < row["min_ms"] <= row["p50_ms"] <= row["p99_ms"], row
        assert row["repetitions"] == 3
        if row["stage"] in ("encode", "decode"):
            assert row["ns_per_entry"] > 0
            # header, section header and rounding up aside: 64 bits raw, 24 at least with coded indices and halves
            assert 24 < row["bits_per_entry"] < 64 + 8 * 120 / (row["numel"] * row["density"]), row
        if row["stage"] in ("update_only", "fused_step"):
            assert row["update_ratio"] > 0
    selectors = {row["selector"] for row in rows if row["stage"] == "fused_step"}
    expected = {"top_k", "trimmed_top_k", "hashed_slots_a", "hashed_slots_b", "threshold_search", "sampled_top_k"}
    assert selectors == expected, selectors
    assert done.stdout.count("\n") == len(rows) + 1


def check_file(program: str, folder: Path) -> None:
    values = [((i * 7919) % 1009 - 504) / 64 for i in range(3000)]
    path = npy(folder / "values.npy", values)
    out = folder / "rows.json"
    what = ["--input", str(path), "--numel", "10000", "--stage", "select", "filter", "--repetitions", "2"]
    done = run(program, "bench", *what, "--json", str(out))
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    assert {row["distribution"] for row in rows} == {"values.npy"}
    assert all(row["verified"] for row in rows)


def check_refusals(program: str, folder: Path) -> None:
    text = folder / "text.npy"
    text.write_text("no array")
    doubles = npy(folder / "doubles.npy", [1.0, 2.0], "<f8")
    empty = npy(folder / "empty.npy", [])
    broken = npy(folder / "broken.npy", [1.0, float("nan")])
    short = npy(folder / "short.npy", [1.0, 2.0, 3.0])
    short.write_bytes(short.read_bytes()[:-3])
    cases: list[tuple[list[str], str]] = [
        (["bench", "--density", "2"], "density of TopK is 2"),
        (["bench", "--density", "0"], "density of TopK is 0"),
        (["bench", "--numel", "0"], "--numel"),
        (["bench", "--numel", "many"], "--numel"),
        (["bench", "--selector", "best"], "--selector"),
        (["bench", "--stage", "all"], "--stage"),
        (["bench", "--threads", "0"], "--threads"),
        (["bench", "--distribution", "flat"], "--distribution"),
        (["bench", "--input", str(folder / "absent.npy")], "absent.npy"),
        (["bench", "--input", str(text)], "text.npy' is not a NumPy file"),
        (["bench", "--input", str(doubles)], "doubles.npy' holds '<f8', not float32"),
        (["bench", "--input", str(empty)], "empty.npy' holds no values"),
        (["bench", "--input", str(broken)], "broken.npy' holds a value that is not finite at 1"),
        (["bench", "--input", str(short)], "short.npy' holds 9 bytes of values, its header says 12"),
        (["bench", "--seconds", "nan"], "--seconds is nan"),
        (["bench", "--seconds", "0"], "--seconds is 0"),
        (["bench", "--repetitions", "-1"], "--repetitions"),
        (["bench", "--repetitions", "0"], "--repetitions"),
        (["bench", "--density", "nan"], "density of TopK is nan"),
        (["bench", "--json", str(folder / "no" / "where.json")], "where.json' cannot be written"),
        ([], "subcommand"),
        (["frobnicate"], "subcommand"),
    ]
    for arguments, words in cases:
        done = run(program, *arguments)
        assert done.returncode != 0, arguments
        assert words in done.stderr, (arguments, done.stderr)
        assert len(done.stderr.strip().splitlines()) <= 2, done.stderr


def check_info(program: str) -> None:
    info = json.loads(run(program, "info", "--json").stdout)
    assert info["cores"] >= 1
    assert info["read_gb_per_s"] > 0
    assert info["simd"] in info["simd_targets"]
    text = run(program, "info").stdout
    assert all(name in text for name in info)
    assert run(program, "--version").stdout.strip() == info["version"]


def main() -> None:
    program = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        check_rows(program, Path(folder))
        check_file(program, Path(folder))
        check_refusals(program, Path(folder))
    check_info(program)


if __name__ == "__main__":
    main()
