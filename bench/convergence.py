"""What compression costs in accuracy: trains with every method, and holds the results against gates.

    .venv/bin/python bench/convergence.py
    .venv/bin/python bench/convergence.py --tasks T1s --methods top_k redsync
    .venv/bin/python bench/convergence.py --report

A run is P workers in one process: a reducer each, connected as threads, on the gradients of their shares of the batch.
Dense runs are plain SGD over the whole batch. Now and then a run is checked for conservation, element by element; the
first one that fails ends everything. Each run's figures are written to runs/ when it is done; what was interrupted goes
on from there when it is started again with the same --out. At the end results.json, curves.json, table.md and a picture
for each task are written, from all runs that are there.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path

import convergence_report as report
from convergence_report import CONTROL, NO_WARM_UP, SMALL_SPARSE, SWITCH
from convergence_tasks import TASKS, Job, run
from convergence_workers import ConservationError
from fashion_mnist_data import DatasetError
from king_james_data import TextError
from training import METHODS

import thinwire

ROOT = Path(__file__).resolve().parent.parent
PERMILLE, PERCENT = 0.001, 0.01  # densities
# (task, method, density, workers, variant) in the order of the tables.
CELLS: list[report.Cell] = [
    *((task, "dense", 1.0, 1, "") for task in TASKS),
    *(("T1s", method, density, 4, "") for density in (PERMILLE, PERCENT) for method in METHODS),
    *(("T1s", method, PERMILLE, 16, "") for method in ("top_k", "dragonn_a")),
    *(("T1s", "top_k", density, 4, CONTROL) for density in (PERMILLE, PERCENT)),
    ("T1s", "top_k", PERMILLE, 4, NO_WARM_UP),
    ("T1s", "dragonn_a", PERMILLE, 4, SMALL_SPARSE),
    ("T1s", "top_k", PERMILLE, 4, SWITCH),
    *(("T2", method, PERCENT, 4, "") for method in METHODS),
    ("T2", "top_k", PERCENT, 20, ""),
    ("T2", "top_k", PERMILLE, 4, ""),
    ("T2", "top_k", PERCENT, 4, CONTROL),
    *(("T1", method, PERMILLE, 4, "") for method in ("top_k", "redsync", "redsync_quantized", "dragonn", "dragonn_a")),
    *(("T3", method, PERMILLE, 4, "") for method in ("top_k", "redsync")),
]
QUICK = [("T1s", "dense", 1.0, 1, ""), ("T1s", "top_k", PERMILLE, 4, ""), ("T1s", "redsync", PERMILLE, 4, SWITCH)]
SECONDS = {"T1s": (48, 68), "T2": (68, 120), "T1": (90, 150), "T3": (250, 330)}  # a guess: of a dense run, of another


def jobs_of(cells: list[report.Cell], seeds: int) -> list[Job]:
    """All runs: dense and gated ones first, cheap tasks first; the slow task T3 last."""
    order = list(TASKS)

    def rank(cell: report.Cell) -> tuple:
        first = cell[1] == "dense" or cell[4] == SWITCH or report.gate_of(cell) is not None
        return cell[0] == "T3", not first, order.index(cell[0]), cell[1] != "dense"

    return [
        Job(task, method, density, ranks, seed, variant)
        for task, method, density, ranks, variant in sorted(cells, key=rank)
        for seed in range(1, seeds + 1)
    ]


def guess(job: Job) -> float:
    """At the seconds of a run."""
    dense, other = SECONDS[job.task]
    return dense if job.method == "dense" else other * max(1.0, job.ranks / 6)


class Runs:
    """The files of the runs that are done."""

    def __init__(self, folder: Path, quick: bool) -> None:
        self.folder, self._quick = folder, quick

    def read(self, job: Job) -> dict | None:
        """What the job measured, if it is done; a file that is damaged or of a quick run counts as none."""
        try:
            found = json.loads(self._path(job).read_text(encoding="utf-8"))
            is_it = {key: found[key] for key in asdict(job)} == asdict(job) and found["quick"] == self._quick
            return found if is_it and {"value", "digest", "losses", "metric_curve"} <= found.keys() else None
        except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def write(self, job: Job, measured: dict) -> None:
        """All of it or nothing, whatever happens meanwhile."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(job)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(measured) + "\n", encoding="utf-8")
        unfinished.replace(path)

    def discard(self, jobs: list[Job]) -> None:
        """Forgets these."""
        for job in jobs:
            self._path(job).unlink(missing_ok=True)

    def _path(self, job: Job) -> Path:
        return self.folder / f"{job.name()}.json"


def run_and_write(job: Job, folder: Path, digest: str, quick: bool) -> dict:
    """One run, in a process of the pool."""
    measured = {**run(job, quick), "digest": digest, "quick": quick}
    Runs(folder, quick).write(job, measured)
    return measured


def digest_of_what_runs() -> str:
    """Of thinwire as it is installed, and of the files that train: a rebuilt kernel has the same version."""
    spec = importlib.util.find_spec("thinwire")
    files = sorted(f for f in Path(spec.origin).parent.iterdir() if f.suffix in (".py", ".so"))
    files += [ROOT / "bench" / f"convergence_{part}.py" for part in ("tasks", "workers")]
    files += [ROOT / "examples" / f"{part}.py" for part in ("fashion_mnist", "word_lm", "king_james_data", "training")]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return f"{importlib.metadata.version('thinwire')}+{digest.hexdigest()[:12]}"


class Progress:
    """A line for each run, with a guess at the time left."""

    def __init__(self, jobs: list[Job], processes: int) -> None:
        self._count, self._done = len(jobs), 0
        self._left = sum(map(guess, jobs))
        self._guessed, self._took = 0.0, 0.0  # of the runs done
        self._processes = processes

    def update(self, job: Job, measured: dict) -> None:
        """After a run."""
        self._done += 1
        self._left -= guess(job)
        self._guessed += guess(job)
        self._took += measured["seconds"]
        left = self._left * self._took / self._guessed / self._processes
        print(
            f"[{self._done:>{len(str(self._count))}}/{self._count}] {job.words()}: {measured['metric']} "
            f"{measured['value']:.2f}, {measured['seconds']:.0f} s; about {left / 60:.0f} min left",
            flush=True,
        )


def run_all(jobs: list[Job], args: argparse.Namespace, digest: str) -> None:
    """Runs these in so many processes at a time. What fails ends all; what is done stays."""
    progress = Progress(jobs, args.jobs)
    waiting = list(jobs)[::-1]
    running: dict[Future, Job] = {}
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        while waiting or running:
            while waiting and len(running) < args.jobs:
                job = waiting.pop()
                running[pool.submit(run_and_write, job, args.out / "runs", digest, args.quick)] = job
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                job = running.pop(future)
                try:
                    progress.update(job, future.result())
                except FAILURES as error:
                    stop(pool)
                    raise Failed(f"{job.words()}: {error}") from error


def stop(pool: ProcessPoolExecutor) -> None:
    """Ends the runs that go on."""
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()


class Failed(Exception):
    """A run failed; the message says which and why."""


FAILURES = (
    ConservationError,
    DatasetError,
    TextError,
    BrokenProcessPool,
    thinwire.Error,
    RuntimeError,
    ValueError,
    OSError,
)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Measure what compression costs in accuracy.")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help="default all")
    parser.add_argument(
        "--methods", nargs="+", choices=["dense", *METHODS], metavar="METHOD", help="dense comes always; default all"
    )
    parser.add_argument("--seeds", type=int, default=3, help="of each cell (default 3)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a core each (default 2)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="default build/convergence; with --quick build/convergence_quick"
    )
    parser.add_argument("--quick", action="store_true", help="one task, few steps: does it work?")
    parser.add_argument("--list", action="store_true", help="run nothing, list the runs and which of them are done")
    parser.add_argument("--report", action="store_true", help="run nothing, write the report again and print it")
    parser.add_argument("--fresh", action="store_true", help="discard what was measured of the chosen runs")
    args = parser.parse_args()
    args.out = args.out or ROOT / "build" / ("convergence_quick" if args.quick else "convergence")
    if args.quick:
        args.seeds = 1
    for name in ("seeds", "jobs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return args


def command_of(args: argparse.Namespace) -> str:
    """As it stands in the report."""
    words = [".venv/bin/python bench/convergence.py"]
    if args.quick:
        words.append("--quick")
    elif args.seeds != 3:
        words.append(f"--seeds {args.seeds}")
    return " ".join(words)


def wanted(cell: report.Cell, args: argparse.Namespace) -> bool:
    """Whether a cell is among those chosen."""
    task, method, *_ = cell
    return task in args.tasks and (method == "dense" or args.methods is None or method in args.methods)


def list_jobs(jobs: list[Job], runs: Runs, processes: int) -> None:
    """Prints the runs, those that are done with their value."""
    left = 0.0
    for job in jobs:
        found = runs.read(job)
        left += 0.0 if found else guess(job)
        print(f"{job.words()}: " + (f"{found['value']:.2f}" if found else f"to do, about {guess(job):.0f} s"))
    print(f"{len(jobs)} runs; about {left / 60 / processes:.0f} min left")


def main() -> int:
    """Runs what is missing and writes the report."""
    args = parse_arguments()
    cells = QUICK if args.quick else CELLS
    jobs = jobs_of([cell for cell in cells if wanted(cell, args)], args.seeds)
    runs = Runs(args.out / "runs", args.quick)
    if not jobs:
        print(f"convergence: --quick has runs of {QUICK[0][0]} only", file=sys.stderr)
        return 1
    if args.list:
        list_jobs(jobs, runs, args.jobs)
        return 0
    digest = digest_of_what_runs()
    begin = time.monotonic()
    if not args.report:
        if args.fresh:
            runs.discard(jobs)
        try:
            runs.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            print(f"convergence: {runs.folder} cannot be made: {error.strerror}", file=sys.stderr)
            return 1
        missing = [job for job in jobs if runs.read(job) is None]
        print(f"{len(jobs)} runs, {len(jobs) - len(missing)} of them done already", flush=True)
        if missing:
            try:
                run_all(missing, args, digest)
            except Failed as error:
                print(f"convergence: {error}", file=sys.stderr)
                return 1
    every = jobs_of(cells, args.seeds)
    measured = [found for job in every if (found := runs.read(job)) is not None]
    if not measured:
        print(f"convergence: nothing was measured in {args.out}", file=sys.stderr)
        return 1
    others = [one for one in measured if one["digest"] != digest]
    if others:
        print(
            f"convergence: {len(others)} of {len(measured)} runs were made with another thinwire or by other files "
            "than those that are here now; --fresh runs them again",
            file=sys.stderr,
        )
    tables = report.write(measured, args.out, command_of(args))
    print(f"\n{tables}")
    print(f"The report is in {os.path.relpath(args.out)}; {(time.monotonic() - begin) / 60:.1f} minutes.")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("convergence: interrupted; start it again to go on", file=sys.stderr)
        os._exit(130)
