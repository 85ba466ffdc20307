"""The demo: trains on Fashion-MNIST over four processes, dense and compressed, and reports what each one cost.

    make demo

Writes results.json, loss.png, accuracy.png and report.html to build/demo. Takes about six minutes on two cores.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import textwrap
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
METHODS = ["dense", "redsync", "dragonn", "no error feedback"]


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Compare dense and compressed training on Fashion-MNIST.")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "demo", metavar="DIR", help="default build/demo")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with Fashion-MNIST's four files")
    parser.add_argument("--seed", type=int, default=1, help="default 1")
    parser.add_argument("--smoke", action="store_true", help="a few dozen steps, to see that everything works")
    return parser.parse_args()


def train(args: argparse.Namespace, data: Path, out: Path) -> bool:
    """Runs all methods in one torchrun job of four ranks; false if a rank failed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command += [str(ROOT / "examples" / "fashion_mnist.py"), "--method", *METHODS]
    command += ["--data", str(data), "--seed", str(args.seed), "--out", str(out)]
    if args.smoke:
        command.append("--smoke")
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    if sys.platform == "linux":  # all ranks are here: works whatever the host is called
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return subprocess.run(command, env=environment, check=False).returncode == 0


def check(rows: list[dict], smoke: bool) -> list[tuple[str, bool]]:
    """What is expected of the run, with its figures, and whether it held."""
    run = {row["method"]: row for row in rows}
    most = max(row["bytes_sent_per_step"] for row in rows if row["method"] != "dense") / 1e3
    dense = run["dense"]["dense_bytes_per_step"] / 1e6
    checks = [(f"compressed: at most 155 kB sent per step and rank: {most:.1f} kB (dense {dense:.2f} MB)", most <= 155)]
    if smoke:  # too few steps to say anything about accuracy
        return checks
    for method, name in (("redsync", "RedSync"), ("dragonn", "DRAGONN")):
        lost = points_lost(run, method)
        checks.append((f"{name}: at most 1.0 point of accuracy below dense: {lost:.2f}", lost <= 1.0))
    lost = points_lost(run, "no error feedback")
    checks.append((f"no error feedback: at least 1.5 points of accuracy below dense: {lost:.2f}", lost >= 1.5))
    return checks


def points_lost(run: dict[str, dict], method: str) -> float:
    """Test accuracy of dense minus that of the method, in points."""
    return round(run["dense"]["test_accuracy"] - run[method]["test_accuracy"], 6)


def main() -> int:
    """Trains, prints the table and writes the report."""
    args = parse_arguments()
    begin = time.monotonic()
    for module in ("torch", "numpy", "matplotlib", "thinwire"):
        if importlib.util.find_spec(module) is None:
            print(f"demo: {module} is not installed in {sys.executable}; run `make demo`.", file=sys.stderr)
            return 1
    import demo_report
    from fashion_mnist_data import DatasetError, locate

    try:
        data = locate(args.data)
    except DatasetError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    args.out.mkdir(parents=True, exist_ok=True)
    runs_file = args.out / "runs.json"
    runs_file.unlink(missing_ok=True)
    print(
        "Training a small CNN on Fashion-MNIST over 4 processes, with each of: " + ", ".join(METHODS) + ".", flush=True
    )
    if not train(args, data, runs_file):
        print("demo: a rank failed; what it said stands above. No report was written.", file=sys.stderr)
        return 1

    runs = json.loads(runs_file.read_text())
    rows = demo_report.results(runs)
    checks = check(rows, args.smoke)
    (args.out / "results.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    images = demo_report.plot(runs, args.out)
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("thinwire", "torch")]
    machine = [f"{os.cpu_count()} cores", platform.machine(), platform.system(), f"Python {platform.python_version()}"]
    setting = "Measured on: " + ", ".join(machine + versions) + "."
    demo_report.write_report(args.out / "report.html", rows, images, checks, setting)

    table = demo_report.table(rows)
    print(f"\n{demo_report.title(rows[0])}\n\n{table}\n")
    for note in demo_report.footnotes(rows):
        print(textwrap.fill(note, table.index("\n")))
    print()
    for text, held in checks:
        print(f"{'held' if held else 'NOT HELD':<8} {text}")
    minutes = (time.monotonic() - begin) / 60
    print(f"\nThe curves are in {os.path.relpath(args.out / 'report.html')}. The demo took {minutes:.1f} minutes.")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("demo: interrupted")
