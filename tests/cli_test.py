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


def section(payload: dict, number: int) -> tuple:
    row = payload["sections"][number]
    return row["kind"], row["begin"], row["extent"], row["coding"], row["entries"], row["least"], row["most"]


def check_inspect(program: str, folder: Path) -> None:
    golden = Path(__file__).parent / "golden"
    payloads = {}
    for path in golden.glob("*.bin"):
        done = run(program, "inspect", "--json", str(path))
        assert done.returncode == 0, (path, done.stderr)
        payload = payloads[path.stem] = json.loads(done.stdout)
        size = 64 + 4 * ((payload["slices"] + 31) // 32) * (payload["status"] == "payload")
        assert (
            size + sum(row["bytes"] for row in payload["sections"]) == path.stat().st_size == payload["payload_bytes"]
        )
        text = run(program, "inspect", str(path)).stdout
        assert all(name in text for name in payload if name != "sections"), text
    mixed = payloads["mixed"]
    assert (mixed["version"], mixed["step"], mixed["job"], mixed["slices"]) == (1, 0x1122334455667788, 3, 2)
    assert (mixed["options_hash"], mixed["layout_hash"]) == ("0xa1a2a3a4a5a6a7a8", "0xb1b2b3b4b5b6b7b8")
    assert (mixed["non_finite"], mixed["block_bytes"], mixed["slices_without_gradient"]) == (11, 256, [])
    assert [section(mixed, i) for i in range(4)] == [
        ("dense", 0, 2, "f32", 2, 0.0, 0.25),
        ("dense", 10, 1, "f32", 1, 7.0, 7.0),
        ("sparse", 2, 8, "raw_u32 x f32", 0, None, None),
        ("sparse", 11, 9, "raw_u32 x f32", 1, 4.0, 4.0),
    ]
    assert mixed["sections"][4]["kind"] == "hashed"
    assert mixed["sections"][4]["slots"] == 4
    assert section(payloads["elias_fano_f16"], 0) == ("sparse", 4, 256, "elias_fano x f16", 3, -2.25, 1024.0)
    # 4 bytes of indices, and four halves of which one fills up; the section's header does not count
    assert payloads["elias_fano_f16"]["sections"][0]["bits_per_entry"] == 8 * (4 + 8) / 3
    assert section(payloads["shared_mean"], 2)[3:] == ("raw_u32 x shared_mean", 3, 1.5, 1.5)
    assert payloads["many_slices"]["slices_without_gradient"] == [i for i in range(35) if i not in (0, 9, 31, 32, 34)]
    assert {name: payloads[name]["status"] for name in ("relayout", "failed", "empty")} == {
        "relayout": "relayout",
        "failed": "failed",
        "empty": "payload",
    }

    good = (golden / "sparse.bin").read_bytes()
    padded = folder / "padded.bin"
    padded.write_bytes(good + bytes(20))
    assert json.loads(run(program, "inspect", "--json", str(padded)).stdout)["padding_bytes"] == 20
    for name, data, words in [
        ("checksum", good[:70] + b"\xff" + good[71:], "refused at byte 60: checksum does not match"),
        ("cut", good[:-5], f"refused at byte {len(good) - 5}: payload cut off"),
        ("short", good[:10], "refused at byte 10: header cut off"),
        ("nothing", b"", "refused at byte 0: header cut off"),
        ("text", b"a" * 100, "refused at byte 0: not a thinwire payload"),
        ("stray", good + b"\0\1", f"refused at byte {len(good) + 1}: bytes behind the payload are not zero"),
        ("zip", b"PK\x03\x04" + bytes(100), "python -m thinwire inspect"),
    ]:
        path = folder / name
        path.write_bytes(data)
        done = run(program, "inspect", str(path))
        assert (done.returncode, done.stdout) == (1, ""), (name, done)
        assert str(path) in done.stderr, (name, done.stderr)
        assert words in done.stderr, (name, done.stderr)
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    done = run(program, "inspect", "--numel", "39", str(golden / "sparse.bin"))
    assert (done.returncode, "section reaches past the bucket" in done.stderr) == (1, True), done
    assert run(program, "inspect", str(folder / "absent")).returncode not in (0, 1)


def main() -> None:
    program = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        check_rows(program, Path(folder))
        check_file(program, Path(folder))
        check_refusals(program, Path(folder))
        check_inspect(program, Path(folder))
    check_info(program)


if __name__ == "__main__":
    main()
