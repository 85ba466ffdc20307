"""Step times of data-parallel training, dense and compressed, on links of several rates.

    sudo .venv/bin/python bench/end_to_end.py
    sudo .venv/bin/python bench/end_to_end.py --models M1 --networks 4x1gbit --methods none dense redsync@0.001

Each rank is a process on a host of a lab (bench/lab): network namespaces behind shaped links. All share this machine's
cores, so computing is slower than on machines of their own, and a method's gain is the smaller for it. Repetitions are
interleaved: every method once, then every method again.

Each measurement is written to runs.jsonl as it is made; a run that was interrupted goes on from there when it is
started again with the same --out. At the end results.json, table.md, speedup.png and step_time.png are written, from
all that has been measured with the thinwire that is installed now. Needs root and iproute2.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import end_to_end_report as report
from lab.network import Lab, LabError, Stopped, parse_rate, require, stoppable
from lab.ranks import environment, rank_programs

ROOT = Path(__file__).resolve().parent.parent
RANK = Path(__file__).with_name("end_to_end_rank.py")
PARAMETERS = {"M1": 4_987_658, "M2": 10_571_200}
NETWORKS = ["4x100mbit", "4x500mbit", "4x1gbit", "4x10gbit", "2x1gbit", "8x1gbit"]
METHODS = [
    "none",
    "dense",
    "bf16",
    "powersgd",
    "torch_topk@0.001",
    "top_k@0.001",
    "top_k@0.01",
    "redsync@0.001",
    "dragonn@0.001",
]
SPARSE = ("torch_topk", "top_k", "redsync", "dragonn")  # those with a density
THINWIRE = ("top_k", "redsync", "dragonn")
WARM_UP = 5  # steps, in which DDP regroups its buckets and PowerSGD begins
SLOW_WARM_UP = 3  # where a dense step takes seconds
BLOCK = 2.5  # seconds that a repetition should last
STEPS_RANGE = (3, 60)
LIMIT = 300  # seconds for an answer of the ranks
FIRST_PORT = 29600


@dataclass(frozen=True)
class Network:
    """So many hosts, each on a link of this rate in bit/s."""

    hosts: int
    rate: float

    @staticmethod
    def parse(text: str) -> "Network":
        """Of "4x100mbit"."""
        hosts, _, rate = text.partition("x")
        if not hosts.isdigit() or int(hosts) < 2:
            raise LabError(f"network '{text}' is not a number of hosts, at least 2, and a rate, such as 4x100mbit")
        return Network(int(hosts), parse_rate(rate))


@dataclass(frozen=True)
class Method:
    """A method, with the share of the entries it sends; 1 for those that send all."""

    name: str
    density: float

    @staticmethod
    def parse(text: str) -> "Method":
        """Of "redsync@0.001" or "dense"."""
        name, _, density = text.partition("@")
        known = [m.partition("@")[0] for m in METHODS]
        if name not in known:
            raise LabError(f"there is no method '{name}', but " + ", ".join(dict.fromkeys(known)))
        if density and name not in SPARSE:
            raise LabError(f"method '{name}' takes no density, but '{text}' gives one")
        try:
            share = float(density or "0.001") if name in SPARSE else 1.0
        except ValueError:
            raise LabError(f"density '{density}' of {name} is not a number") from None
        if not 0 < share <= 1:
            raise LabError(f"density {density} of {name} is not in (0, 1]")
        return Method(name, share)


@dataclass(frozen=True)
class Cell:
    """One measurement to make."""

    network: Network
    model: str
    method: Method
    repetition: int

    def key(self, setting: dict) -> dict:
        """What a measurement is known by in runs.jsonl."""
        thinwire = self.method.name in THINWIRE
        return {
            "model": self.model,
            "hosts": self.network.hosts,
            "rate_mbit": self.network.rate / 1e6,
            "method": self.method.name,
            "density": self.method.density,
            "repetition": self.repetition,
            "steps_asked": setting["steps"],
            "options": setting["options"] if thinwire else {},
            "thinwire": setting["thinwire"] if thinwire else None,
        }

    def words(self) -> str:
        """For people."""
        rate = report.rate_words(self.network.rate / 1e6)
        return f"{self.network.hosts} hosts, {rate}, {self.model}, {report.method_words(*_fields(self.method))}"

    def weight(self) -> float:
        """A guess at its seconds."""
        share = {"dense": 1.0, "bf16": 0.5}.get(self.method.name, 0.01)
        ranks = self.network.hosts
        wire = 8 * report.dense_bytes(PARAMETERS[self.model], ranks) * share / self.network.rate
        compute = {"M1": 0.04, "M2": 0.18}[self.model] * ranks / 2
        step = wire + compute
        return 0.5 + step * (SLOW_WARM_UP if step > 1 else WARM_UP) + max(BLOCK, step * STEPS_RANGE[0])


def _fields(method: Method) -> tuple[str, float]:
    return method.name, method.density


class Team:
    """The rank processes on a lab's hosts. They live as long as the lab: importing torch takes many seconds."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._connections = 0
        self._processes = [
            lab.popen(
                program.host,
                program.command,
                env=environment() | {"TORCH_CPP_LOG_LEVEL": "ERROR"} | program.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for program in rank_programs(lab, [sys.executable, str(RANK)])
        ]

    def connect(self) -> None:
        """New connections, on a port of their own."""
        self._connections += 1
        self.ask("connect", address=f"tcp://{self._lab.hosts[0].address}:{FIRST_PORT + self._connections}")

    def ask(self, what: str, **order: object) -> list[dict]:
        """Gives all ranks the same order and returns their answers."""
        line = json.dumps({"do": what, **order})
        for rank, process in enumerate(self._processes):
            try:
                print(line, file=process.stdin, flush=True)
            except BrokenPipeError:
                raise LabError(f"rank {rank} has ended") from None
        deadline = time.monotonic() + LIMIT
        answers: dict[int, dict] = {}
        while len(answers) < len(self._processes):
            waiting = {p.stdout: rank for rank, p in enumerate(self._processes) if rank not in answers}
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise LabError(f"ranks {sorted(waiting.values())} have not answered '{what}' within {LIMIT} s")
            for stream in ready:
                answer = stream.readline()
                answers[waiting[stream]] = json.loads(answer) if answer else {"error": "the process has ended"}
                error = answers[waiting[stream]].get("error")
                if error:
                    raise LabError(f"rank {waiting[stream]} could not '{what}': {error}")
        return [answers[rank] for rank in range(len(self._processes))]


def measure(lab: Lab, team: Team, cell: Cell, setting: dict) -> dict:
    """One method for one block of steps."""
    method = cell.method
    step = 8 * report.dense_bytes(PARAMETERS[cell.model], cell.network.hosts) / cell.network.rate
    slow = method.name in ("dense", "bf16", "powersgd") and step > 1
    prepared = team.ask(
        "prepare",
        model=cell.model,
        method=method.name,
        density=method.density,
        options=setting["options"] if method.name in THINWIRE else {},
        warm_up=SLOW_WARM_UP if slow else WARM_UP,
    )
    expected = max(answer["step_seconds"] for answer in prepared)
    count = setting["steps"] or min(max(math.ceil(BLOCK / expected), STEPS_RANGE[0]), STEPS_RANGE[1])
    before = lab.traffic()
    answers = team.ask("steps", count=count)
    after = lab.traffic()
    checksums = {answer["checksum"] for answer in team.ask("finish")}
    sent = [b.sent_bytes - a.sent_bytes for a, b in zip(before, after, strict=True)]
    seconds = max(a["end"] for a in answers) - min(a["begin"] for a in answers)
    thinwire = answers[0]["stages"] is not None
    return {
        "parameters": prepared[0]["parameters"],
        "steps": count,
        "step_ms": 1e3 * seconds / count,
        "interface_bytes_per_step": sum(sent) / len(sent) / count,
        "stats_bytes_per_step": _mean([a["stats_bytes"] for a in answers]) if thinwire else None,
        "stages_ms": {name: 1e3 * _mean([a["stages"][name] for a in answers]) for name in answers[0]["stages"]}
        if thinwire
        else None,
        "cpu_ms_per_step": 1e3 * _mean([a["cpu_seconds"] for a in answers]) / count,
        "replicas_equal": len(checksums) == 1 if method.name != "none" else None,
        "loss": max(a["loss"] for a in answers) if all(math.isfinite(a["loss"]) for a in answers) else None,
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


class Progress:
    """A line for each measurement, with a guess at the time left."""

    def __init__(self, cells: list[Cell]) -> None:
        self._count, self._done = len(cells), 0
        self._weight, self._weight_done = sum(cell.weight() for cell in cells), 0.0
        self._seconds = 0.0  # spent on measurements

    def update(self, cell: Cell, result: dict, seconds: float) -> None:
        """After a measurement."""
        self._done += 1
        self._weight_done += cell.weight()
        self._seconds += seconds
        left = (self._weight - self._weight_done) * self._seconds / self._weight_done
        trouble = ("" if result["loss"] is not None else "; THE LOSS IS NOT FINITE") + (
            "; THE REPLICAS DIFFER" if result["replicas_equal"] is False else ""
        )
        print(
            f"[{self._done:>{len(str(self._count))}}/{self._count}] {cell.words()}: {result['step_ms']:.1f} ms a step, "
            f"{result['interface_bytes_per_step'] / 1e3:,.1f} kB{trouble}; about {left / 60:.0f} min left",
            flush=True,
        )


def run(cells: list[Cell], setting: dict, runs: Path) -> None:
    """Makes the measurements that are missing, lab by lab."""
    progress = Progress(cells)
    for hosts in dict.fromkeys(cell.network.hosts for cell in cells):
        mine = [cell for cell in cells if cell.network.hosts == hosts]
        print(f"starting {hosts} ranks", flush=True)
        with Lab([mine[0].network.rate] * hosts) as lab:
            team = Team(lab)
            for network in dict.fromkeys(cell.network for cell in mine):
                lab.set_rates([network.rate] * hosts)
                team.connect()
                for cell in (cell for cell in mine if cell.network == network):
                    begin = time.monotonic()
                    result = measure(lab, team, cell, setting)
                    with runs.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(cell.key(setting) | result) + "\n")
                    progress.update(cell, result, time.monotonic() - begin)


def installed_thinwire() -> str:
    """Version and a digest of what is installed: a rebuilt kernel has the same version."""
    spec = importlib.util.find_spec("thinwire")
    if spec is None or spec.origin is None:
        raise LabError(f"thinwire is not installed in {sys.executable}; run `make python`")
    digest = hashlib.sha256()
    for file in sorted(Path(spec.origin).parent.iterdir()):
        if file.suffix in (".py", ".so"):
            digest.update(file.read_bytes())
    return f"{importlib.metadata.version('thinwire')}+{digest.hexdigest()[:12]}"


def read_runs(runs: Path) -> list[dict]:
    """What has been measured. A last line that was cut off is removed."""
    text = runs.read_text(encoding="utf-8") if runs.exists() else ""
    if text and not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        runs.write_text(text, encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Measure step times of training on links of several rates.")
    parser.add_argument("--models", nargs="+", choices=PARAMETERS, default=list(PARAMETERS), help="default both")
    parser.add_argument("--networks", nargs="+", default=NETWORKS, metavar="NxRATE", help=" ".join(NETWORKS))
    parser.add_argument("--methods", nargs="+", default=METHODS, metavar="METHOD[@DENSITY]", help=" ".join(METHODS))
    parser.add_argument("--repetitions", type=int, default=3, help="default 3")
    parser.add_argument("--steps", type=int, help=f"of a repetition (default: as many as take {BLOCK} s)")
    parser.add_argument(
        "--options",
        nargs="+",
        default=[],
        metavar="NAME=EXPRESSION",
        help="options of thinwire's methods in Python, such as dense_below=1024",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="default build/end_to_end; with --quick build/end_to_end_quick"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one model, two methods, one rate, few steps: does it work?"
    )
    parser.add_argument("--report", action="store_true", help="measure nothing, write the report again")
    args = parser.parse_args()
    if args.quick:
        args.models, args.networks, args.methods = ["M1"], ["2x1gbit"], ["dense", "redsync@0.001"]
        args.repetitions, args.steps = 1, 8
    args.out = args.out or ROOT / "build" / ("end_to_end_quick" if args.quick else "end_to_end")
    for name in ("repetitions", "steps"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return args


def plan(args: argparse.Namespace) -> tuple[list[Cell], dict]:
    """All measurements in the order in which they are made, and what they have in common."""
    networks, methods = [Network.parse(text) for text in args.networks], [Method.parse(text) for text in args.methods]
    bad = [text for text in args.options if not text.partition("=")[0].isidentifier() or not text.partition("=")[2]]
    if bad:
        raise LabError(f"option '{bad[0]}' is not NAME=EXPRESSION")
    options = dict(text.split("=", 1) for text in args.options)
    setting = {"steps": args.steps, "options": options, "thinwire": installed_thinwire()}
    sizes = list(dict.fromkeys(network.hosts for network in networks))
    networks.sort(key=lambda network: sizes.index(network.hosts))  # one lab for each size
    cells = [
        Cell(network, model, method, repetition)
        for network in networks
        for model in args.models
        for repetition in range(args.repetitions)
        for method in methods
    ]
    return list(dict.fromkeys(cells)), setting


def main() -> int:
    """The exit code."""
    args = parse_arguments()
    try:
        with stoppable():
            cells, setting = plan(args)
            runs = args.out / "runs.jsonl"
            if not args.report:
                require()
                try:
                    args.out.mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    raise LabError(f"the folder of --out {args.out} cannot be made: {error.strerror}") from None
            done = [_key_of(row) for row in read_runs(runs)]
            missing = [cell for cell in cells if cell.key(setting) not in done]
            if missing and not args.report:
                if len(missing) < len(cells):
                    print(f"{len(cells) - len(missing)} of {len(cells)} measurements are there already", flush=True)
                run(missing, setting, runs)
            current = [row for row in read_runs(runs) if row["thinwire"] in (None, setting["thinwire"])]
            if not current:
                raise LabError(f"nothing was measured in {args.out} with the thinwire that is installed now")
            rows = report.write(current, args.out)
            print(f"\n{(args.out / 'table.md').read_text(encoding='utf-8')}")
            print(f"{len(rows)} rows in {os.path.relpath(args.out / 'results.json')}")
    except LabError as error:
        print(f"end_to_end: {error}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        print("end_to_end: interrupted; start it again to go on", file=sys.stderr)
        return 128 + stopped.number
    return 0


def _key_of(row: dict) -> dict:
    names = Cell(Network(2, 1e6), "M1", Method("dense", 1.0), 0).key({"steps": None, "options": {}, "thinwire": ""})
    return {name: row[name] for name in names}


if __name__ == "__main__":
    sys.exit(main())
