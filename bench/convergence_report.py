"""What convergence.py makes of its runs: gates, results.json, curves.json, table.md and a picture for each task."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

CONTROL, NO_WARM_UP, SMALL_SPARSE, SWITCH = (
    "no error feedback",
    "no dense warm-up",
    "small tensors sparse",
    "switch",
)
CURVE_EVERY = 10  # steps to a point of a loss curve
WINDOW = 50  # steps on each side of a switch
TITLES = {
    "T1s": "T1s: CNN 8–16, linear 784–256–10",
    "T1": "T1: CNN 16–32, linear 1568–512–10",
    "T3": "T3: CNN 32–64–64–64–128, linear 1152–64–10",
    "T2": "T2: tied embedding 4000×128, LSTM 2×128",
}
NAMES = {
    "top_k": "top_k",
    "redsync": "redsync",
    "redsync_quantized": "redsync_quantized",
    "redsync_quantized_paper_rule": "redsync_quantized, rounding not fed back",
    "dragonn": "dragonn, layout b",
    "dragonn_a": "dragonn, layout a",
    "dgc": "dgc",
}
COLOURS = {
    "top_k": "#e8a33d",
    "redsync": "#0072b2",
    "redsync_quantized": "#56b4e9",
    "redsync_quantized_paper_rule": "#7b68b8",
    "dragonn": "#d55e00",
    "dragonn_a": "#a6761d",
    "dgc": "#009e73",
}

Run = dict  # one file of runs/
Cell = tuple[str, str, float, int, str]  # task, method, density, ranks, variant


@dataclass(frozen=True)
class Gate:
    """How far the mean over the seeds may be behind the dense one, in points or percent."""

    task: str
    density: float
    methods: tuple[str, ...]
    limit: float
    ranks: int = 4
    variant: str = ""
    must_lose: bool = False  # at least that far behind: a control

    def words(self) -> str:
        """For people."""
        return f"{'≥' if self.must_lose else '≤'} {self.limit:.1f}"

    def held(self, gap: float) -> bool:
        """Whether a gap is within it."""
        return gap >= self.limit if self.must_lose else gap <= self.limit


_EF = ("top_k", "redsync", "redsync_quantized", "dragonn", "dragonn_a", "dgc")
GATES = [
    Gate("T1s", 0.001, ("top_k", "redsync", "redsync_quantized", "dragonn"), 0.5),
    Gate("T1s", 0.001, ("dragonn_a",), 0.8),
    Gate("T1s", 0.001, ("top_k", "dragonn_a"), 0.8, ranks=16),
    Gate("T1s", 0.01, ("top_k", "redsync"), 0.6),
    Gate("T1s", 0.01, ("dragonn_a",), 1.0),
    Gate("T1", 0.001, ("top_k", "redsync"), 0.5),
    Gate("T1", 0.001, ("redsync_quantized", "dragonn"), 0.7),
    Gate("T1", 0.001, ("dragonn_a",), 0.8),
    Gate("T3", 0.001, ("top_k", "redsync"), 2.5),  # of one epoch, after its first measurement; 1.0 was guessed
    Gate("T2", 0.01, _EF, 3.0),
    Gate("T2", 0.01, ("top_k",), 8.0, ranks=20),
    Gate("T1s", 0.001, ("top_k",), 1.5, variant=CONTROL, must_lose=True),
    Gate("T2", 0.01, ("top_k",), 15.0, variant=CONTROL, must_lose=True),
]


def gate_of(cell: Cell) -> Gate | None:
    """The gate that a cell has to pass, if any."""
    task, method, density, ranks, variant = cell
    for gate in GATES:
        its = (gate.task, gate.density, gate.ranks, gate.variant)
        if its == (task, density, ranks, variant) and method in gate.methods:
            return gate
    return None


def cell_of(run: Run) -> Cell:
    """What a run is one seed of."""
    return run["task"], run["method"], run["density"], run["ranks"], run["variant"]


def in_points(run: Run) -> bool:
    """Whether the metric is an accuracy in percent, not a perplexity."""
    return "accuracy" in run["metric"]


def gap(value: float, dense_mean: float, points: bool) -> float:
    """How far a value is behind dense: points of accuracy, or percent of perplexity. Negative: ahead."""
    return dense_mean - value if points else 100 * (value / dense_mean - 1)


def dense_means(runs: Iterable[Run]) -> dict[str, float]:
    """Mean metric of the dense runs by task."""
    values: dict[str, list[float]] = {}
    for run in runs:
        if run["method"] == "dense":
            values.setdefault(run["task"], []).append(run["value"])
    return {task: fmean(of_task) for task, of_task in values.items()}


def results(runs: list[Run]) -> list[dict]:
    """One row for each run: its figures without the curves, and what it is compared with."""
    means = dense_means(runs)
    verdict = switch_verdict(runs)
    rows = []
    for run in runs:
        row = {key: value for key, value in run.items() if key not in ("losses", "metric_curve", "digest")}
        row["dense_mean"] = means.get(run["task"])
        if run["variant"] == SWITCH:
            row["switch"] = verdict
        rows.append(row)
    return rows


def summaries(runs: list[Run]) -> list[dict]:
    """One row for each cell: mean, gap to dense, spread over the seeds, gate and whether it was held."""
    means = dense_means(runs)
    groups: dict[Cell, list[Run]] = {}
    for run in runs:
        groups.setdefault(cell_of(run), []).append(run)
    rows = []
    for cell, group in groups.items():
        first, values = group[0], [run["value"] for run in group]
        points, dense = in_points(first), means.get(first["task"])
        gaps = None if dense is None else [gap(value, dense, points) for value in values]
        behind = None if dense is None else gap(fmean(values), dense, points)
        gate = gate_of(cell)
        bytes_sent = None if first["method"] == "dense" else fmean(run["bytes_sent_per_step"] for run in group)
        rows.append(
            {
                **dict(zip(("task", "method", "density", "ranks", "variant"), cell, strict=True)),
                "seeds": len(group),
                "points": points,
                "mean": fmean(values),
                "least": min(values),
                "most": max(values),
                "gap": behind,
                "gap_spread": None if gaps is None else max(gaps) - min(gaps),
                "gate": gate.words() if gate else None,
                "held": gate.held(behind) if gate and behind is not None else None,
                "bytes_sent_per_step": bytes_sent,
                "dense_bytes_per_step": first["dense_bytes_per_step"],
                "density_sent": fmean(run["density_sent"] for run in group),
                "steps": first["steps"],
                "parameters": first["parameters"],
                "metric": first["metric"],
            }
        )
    return rows


def switch_verdict(runs: list[Run]) -> dict | None:
    """Whether the loss jumps where a run goes from dense to sparse and back.

    A jump is how much further behind the dense run of the same seed, which sees the same examples, the mean loss of the
    steps after a switch is than that of the steps before. Its mean over the seeds is held against the spread of the
    dense seeds' own losses (largest - smallest, mean over the windows).
    """
    dense = {run["seed"]: run for run in runs if run["method"] == "dense" and run["task"] == "T1s"}
    switched = [run for run in runs if run["variant"] == SWITCH and run["seed"] in dense]
    if not switched:
        return None
    verdict: dict = {"window": 0, "seeds": len(switched), "switches": []}
    for name, step in zip(("dense to sparse", "sparse to dense"), switched[0]["switched_after"], strict=True):
        window = min(WINDOW, step, switched[0]["steps"] - step)
        sides = slice(step - window, step), slice(step, step + window)
        excess = [
            [fmean(run["losses"][side]) - fmean(dense[run["seed"]]["losses"][side]) for side in sides]
            for run in switched
        ]
        spreads = [max(own) - min(own) for own in ([fmean(d["losses"][s]) for d in dense.values()] for s in sides)]
        jump, spread = fmean(after - before for before, after in excess), fmean(spreads)
        verdict["window"] = window
        verdict["switches"].append(
            {
                "name": name,
                "after_step": step,
                "loss_before": fmean(fmean(run["losses"][sides[0]]) for run in switched),
                "loss_after": fmean(fmean(run["losses"][sides[1]]) for run in switched),
                "dense_before": fmean(fmean(dense[run["seed"]]["losses"][sides[0]]) for run in switched),
                "dense_after": fmean(fmean(dense[run["seed"]]["losses"][sides[1]]) for run in switched),
                "jump": jump,
                "dense_spread": spread,
                "held": jump <= spread,
            }
        )
    verdict["held"] = all(switch["held"] for switch in verdict["switches"])
    return verdict


def table(runs: list[Run], command: str) -> str:
    """Everything in Markdown."""
    rows = summaries(runs)
    tasks = [task for task in TITLES if any(row["task"] == task for row in rows)]
    parts = [_dense_table([row for row in rows if row["method"] == "dense"], tasks)]
    for task in tasks:
        mine = [row for row in rows if row["task"] == task and row["method"] != "dense"]
        plain = _order([row for row in mine if not row["variant"]])
        others = [row for row in mine if row["variant"]]
        if plain:
            parts += [f"### {TITLES[task]}\n", _cells(plain, with_variant=False)]
        if others:
            parts += [f"{task}, controls and variants:\n", _cells(others, with_variant=True)]
    verdict = switch_verdict(runs)
    if verdict:
        parts.append(_switch_table(verdict))
    gated = [row for row in rows if row["held"] is not None]
    held = sum(row["held"] for row in gated)
    parts.append(f"{held} of {len(gated)} gates were held. Measured with `{command}`.\n")
    return "\n".join(parts)


def _order(rows: list[dict]) -> list[dict]:
    order = list(NAMES)
    return sorted(rows, key=lambda row: (row["ranks"], row["density"], order.index(row["method"])))


def _markdown(lines: list[list[str]]) -> str:
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _dense_table(rows: list[dict], tasks: list[str]) -> str:
    lines = [["dense", "parameters", "steps", "metric", "mean", "smallest–largest", "seeds"]]
    for row in sorted(rows, key=lambda row: tasks.index(row["task"])):
        span = f"{row['least']:.2f}–{row['most']:.2f}"
        shape = [row["task"], f"{row['parameters']:,}", f"{row['steps']:,}", row["metric"]]
        lines.append([*shape, f"{row['mean']:.2f}", span, str(row["seeds"])])
    return _markdown(lines)


def _cells(rows: list[dict], with_variant: bool) -> str:
    unit = "points" if rows[0]["points"] else "%"
    heading = ["method", "density", "workers", rows[0]["metric"], f"behind dense, {unit}", "spread", "gate", "held"]
    heading += ["sent a step and worker", "of dense", "seeds"]
    lines = [[*(["variant"] if with_variant else []), *heading]]
    for row in rows:
        known = row["gap"] is not None
        line = [
            NAMES[row["method"]],
            f"{100 * row['density']:g} %",
            str(row["ranks"]),
            f"{row['mean']:.2f}",
            f"{row['gap']:+.2f}" if known else "–",
            f"{row['gap_spread']:.2f}" if known else "–",
            row["gate"] or "–",
            {True: "yes", False: "**NO**", None: "–"}[row["held"]],
            f"{row['bytes_sent_per_step'] / 1e3:,.1f} kB",
            f"{100 * row['bytes_sent_per_step'] / row['dense_bytes_per_step']:.2f} %",
            str(row["seeds"]),
        ]
        lines.append([*([row["variant"]] if with_variant else []), *line])
    return _markdown(lines)


def _switch_table(verdict: dict) -> str:
    lines = [["switch, T1s", "after step", "loss before", "after", "dense before", "after", "jump", "may be", "held"]]
    for switch in verdict["switches"]:
        figures = [f"{switch[key]:.4f}" for key in ("loss_before", "loss_after", "dense_before", "dense_after")]
        bounds = [f"{switch['jump']:+.4f}", f"≤ {switch['dense_spread']:.4f}", "yes" if switch["held"] else "**NO**"]
        lines.append([switch["name"], str(switch["after_step"]), *figures, *bounds])
    return _markdown(lines)


def curves(runs: list[Run]) -> list[dict]:
    """The loss of each run in means of 10 steps and its metric, by steps done."""
    keys = ("task", "method", "density", "ranks", "seed", "variant")
    return [
        {key: run[key] for key in keys} | {"loss_curve": loss_curve(run["losses"]), "metric_curve": run["metric_curve"]}
        for run in runs
    ]


def loss_curve(losses: list[float]) -> list[list[float]]:
    """Steps done and the mean loss of those since the last point."""
    begins = range(0, len(losses), CURVE_EVERY)
    windows = [losses[begin : begin + CURVE_EVERY] for begin in begins]
    return [[begin + len(w), round(fmean(w), 5)] for begin, w in zip(begins, windows, strict=True)]


def plot(runs: list[Run], folder: Path) -> list[Path]:
    """One picture for each task: loss and metric against the step, means over the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    paths = []
    for task in TITLES:
        groups: dict[Cell, list[Run]] = {}
        for run in runs:
            if run["task"] == task and run["variant"] != SWITCH:
                groups.setdefault(cell_of(run), []).append(run)
        if not groups:
            continue
        figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
        for cell, group in sorted(groups.items(), key=lambda item: item[0][1] != "dense"):
            _, method, density, ranks, variant = cell
            colour = "#333333" if method == "dense" else "#c23b75" if variant == CONTROL else COLOURS[method]
            style = "-" if method == "dense" or density <= 0.001 else "--"
            style = ":" if ranks > 4 or variant not in ("", CONTROL) else style
            label = "dense" if method == "dense" else f"{NAMES[method]} {100 * density:g} %"
            label += f", {ranks} workers" if ranks > 4 else ""
            label = f"{label}, {variant}" if variant else label
            for axis, points in (
                (left, [loss_curve(run["losses"]) for run in group]),
                (right, [run["metric_curve"] for run in group]),
            ):
                steps = [step for step, _ in points[0]]
                means = [fmean(value for _, value in at) for at in zip(*points, strict=True)]
                axis.plot(steps, means, style, color=colour, linewidth=1.2, label=label)
        metric = next(iter(groups.values()))[0]["metric"]
        left.set(title=f"{TITLES[task]}: training loss", xlabel="step", yscale="log")
        right.set(title=metric, xlabel="step")
        finals = [run["value"] for group in groups.values() for run in group]
        if "accuracy" in metric:
            right.set_ylim(max(0.0, min(finals) - 2), max(finals) + 0.5)
        else:
            right.set_ylim(min(finals) * 0.97, max(finals) * 1.6)
        for axis in (left, right):
            axis.grid(alpha=0.3)
        right.legend(fontsize="x-small", ncols=2)
        paths.append(folder / f"{task}.png")
        figure.savefig(paths[-1], dpi=130)
        plt.close(figure)
    return paths


def write(runs: list[Run], folder: Path, command: str) -> str:
    """Writes results.json, curves.json, table.md and the pictures; returns the tables."""
    for name, content in (("results.json", results(runs)), ("curves.json", curves(runs))):
        text = "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in content) + "\n]\n"
        (folder / name).write_text(text, encoding="utf-8")
    tables = table(runs, command)
    (folder / "table.md").write_text(tables, encoding="utf-8")
    plot(runs, folder)
    return tables
