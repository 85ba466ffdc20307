"""What end_to_end.py makes of its measurements: results.json, table.md and two pictures."""

import json
import statistics
from collections.abc import Iterable
from pathlib import Path

CELL = ("model", "hosts", "rate_mbit", "method", "density", "options")  # what one row is about
STAGES = ("select", "encode", "exchange", "decode")
NAMES = {
    "none": "no communication",
    "dense": "dense f32 (plain DDP)",
    "bf16": "bf16 (DDP's hook)",
    "powersgd": "PowerSGD rank 1 (DDP's hook)",
    "torch_topk": "torch.topk by hand",
    "top_k": "thinwire top_k",
    "redsync": "thinwire redsync",
    "dragonn": "thinwire dragonn",
}
MODELS = {
    "M1": "M1: MLP 512–1536–1536–1024–256–10, batch 16 per rank",
    "M2": "M2: embedding 4000×600, LSTM 2×600, linear 600→4000, 4 sequences of 12 tokens per rank",
}
COLOURS = {
    ("none", 1.0): "#999999",
    ("dense", 1.0): "#333333",
    ("bf16", 1.0): "#56b4e9",
    ("powersgd", 1.0): "#009e73",
    ("torch_topk", 0.001): "#c23b75",
    ("top_k", 0.001): "#e8a33d",
    ("top_k", 0.01): "#a6761d",
    ("redsync", 0.001): "#0072b2",
    ("dragonn", 0.001): "#d55e00",
}
PARTS = {  # of the bars
    "compute": "#bbbbbb",
    "select": "#e8a33d",
    "encode": "#c23b75",
    "exchange, with waiting": "#0072b2",
    "decode": "#009e73",
    "communication and all else": "#56b4e9",
}

Row = dict  # of results.json


def dense_bytes(parameters: int, ranks: int) -> float:
    """What each rank sends in a ring all-reduce of f32."""
    return 2 * (ranks - 1) / ranks * 4 * parameters


def rate_words(rate_mbit: float) -> str:
    """For people."""
    return f"{rate_mbit / 1e3:g} Gbit/s" if rate_mbit >= 1000 else f"{rate_mbit:g} Mbit/s"


def method_words(method: str, density: float, options: dict | None = None) -> str:
    """For people."""
    words = NAMES[method] + (f" {100 * density:g} %" if density < 1 else "")
    return words + "".join(f", {name}={value}" for name, value in (options or {}).items())


def results(runs: Iterable[dict]) -> list[Row]:
    """One row for each model, network and method: medians over the repetitions."""
    groups: dict[str, list[dict]] = {}
    for measured in runs:
        groups.setdefault(json.dumps([measured[name] for name in CELL]), []).append(measured)
    rows = [_row(group) for group in groups.values()]
    rows.sort(key=lambda row: (row["model"], row["hosts"], row["rate_mbit"]))
    for row in rows:
        row["speedup"] = row["headroom_closed"] = row["no_communication_ms"] = None
        peers = {other["method"]: other["step_ms"] for other in rows if _network(other) == _network(row)}
        if "none" in peers:
            row["no_communication_ms"] = peers["none"]
        if "dense" in peers:
            row["speedup"] = round(peers["dense"] / row["step_ms"], 3)
            if peers.get("none", peers["dense"]) < peers["dense"]:
                closed = (peers["dense"] - row["step_ms"]) / (peers["dense"] - peers["none"])
                row["headroom_closed"] = round(closed, 4)
    return rows


def _row(group: list[dict]) -> Row:
    def median(values: list[float | None]) -> float | None:
        return None if None in values else round(statistics.median(values), 3)

    first, times = group[0], [one["step_ms"] for one in group]
    equal = {one["replicas_equal"] for one in group}
    stages = {name: median([one["stages_ms"][name] for one in group]) for name in first["stages_ms"] or ()}
    return {
        **{name: first[name] for name in CELL},
        "parameters": first["parameters"],
        "repetitions": len(group),
        "steps": [one["steps"] for one in group],
        "step_ms": median(times),
        "step_ms_min": round(min(times), 3),
        "step_ms_max": round(max(times), 3),
        "interface_bytes_per_step": median([one["interface_bytes_per_step"] for one in group]),
        "stats_bytes_per_step": median([one["stats_bytes_per_step"] for one in group]),
        "dense_bytes_per_step": dense_bytes(first["parameters"], first["hosts"]),
        "stages_ms": stages or None,
        "cpu_ms_per_step": median([one["cpu_ms_per_step"] for one in group]),
        "replicas_equal": None if equal == {None} else False not in equal,
        "loss_finite": all(one["loss"] is not None for one in group),
        "thinwire": first["thinwire"],
    }


def _network(row: Row) -> tuple:
    return row["model"], row["hosts"], row["rate_mbit"]


def _method(row: Row) -> tuple:
    return row["method"], row["density"], json.dumps(row["options"])


def _ordered_methods(rows: list[Row]) -> list[tuple]:
    """Of these rows: in the order of NAMES."""
    order = list(NAMES)
    return sorted({_method(row) for row in rows}, key=lambda method: (order.index(method[0]), *method[1:]))


def _words(method: tuple) -> str:
    return method_words(method[0], method[1], json.loads(method[2]))


def table(rows: list[Row]) -> str:
    """Three tables for each model, in Markdown."""
    parts = [
        "# Step times on shaped links\n",
        "Medians over the repetitions. A share of the headroom is (dense − x) / (dense − no communication). Bytes are "
        "those of a host's interface, headers and acknowledgements included.\n",
    ]
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        parts.append(f"## {MODELS[model]}, {mine[0]['parameters'] / 1e6:.1f} M parameters\n")
        parts += [
            _grid(mine, "speed-up, share of headroom", _gain),
            _grid(mine, "ms a step (min–max)", _time),
            _grid(mine, "sent per step and host", lambda row: f"{row['interface_bytes_per_step'] / 1e3:,.1f} kB"),
        ]
        doubts = [
            f"- {_words(_method(row))} on {row['hosts']}×{rate_words(row['rate_mbit'])}: {what}\n"
            for row in mine
            for what, wrong in (
                ("the replicas differ", row["replicas_equal"] is False),
                ("the loss is not finite", not row["loss_finite"]),
            )
            if wrong
        ]
        if doubts:
            parts.append("Not to be trusted:\n\n" + "".join(doubts))
    return "\n".join(parts)


def _gain(row: Row) -> str:
    gain = "–" if row["speedup"] is None else f"{row['speedup']:.2f}×"
    return gain if row["headroom_closed"] is None else f"{gain}, {100 * row['headroom_closed']:.0f} %"


def _time(row: Row) -> str:
    return f"{row['step_ms']:.1f} ({row['step_ms_min']:.1f}–{row['step_ms_max']:.1f})"


def _grid(rows: list[Row], title: str, cell) -> str:
    networks = list(dict.fromkeys(_network(row) for row in rows))
    by_place = {(_network(row), _method(row)): cell(row) for row in rows}
    lines = [[title, *(f"{hosts}×{rate_words(rate)}" for _, hosts, rate in networks)]]
    lines.append(["---"] * len(lines[0]))
    for method in _ordered_methods(rows):
        lines.append([_words(method), *(by_place.get((network, method), "") for network in networks)])
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def bar(row: Row) -> dict[str, float]:
    """Where a step's time goes, ms by part.

    Compute is a step without communication. For thinwire the rest is shared among the stages in proportion to their
    time, as far as they do not fit beside it: stages run in a thread of their own while backward goes on.
    """
    compute = min(row["no_communication_ms"], row["step_ms"])
    rest = row["step_ms"] - compute
    parts = {"compute": compute}
    if row["stages_ms"]:
        stages = {name: row["stages_ms"][name] for name in STAGES}
        scale = min(1.0, rest / max(sum(stages.values()), 1e-9))
        parts |= {name: scale * stages[name.split(",")[0]] for name in list(PARTS)[1:-1]}
        rest -= scale * sum(stages.values())
    return parts | {list(PARTS)[-1]: max(0.0, rest)}


def plot(rows: list[Row], folder: Path) -> list[Path]:
    """Writes speedup.png and step_time.png; returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    hosts = max(
        {row["hosts"] for row in rows},
        key=lambda count: len({_network(row) for row in rows if row["hosts"] == count}),
    )
    mine = [row for row in rows if row["hosts"] == hosts]
    models = list(dict.fromkeys(row["model"] for row in mine))
    rates = sorted({row["rate_mbit"] for row in mine})
    paths = [folder / "speedup.png", folder / "step_time.png"]

    figure, axes = plt.subplots(1, len(models), figsize=(6.4 * len(models), 4.6), squeeze=False, layout="constrained")
    for model, axis in zip(models, axes[0], strict=True):
        of_model = [row for row in mine if row["model"] == model and row["speedup"] is not None]
        for method in _ordered_methods(of_model):
            line = [row for row in of_model if _method(row) == method]
            style = "--" if method[0] == "none" else "-"
            colour = COLOURS.get(method[:2])
            gains = [row["speedup"] for row in line]
            axis.plot([row["rate_mbit"] for row in line], gains, style, marker="o", color=colour, label=_words(method))
        axis.set(xscale="log", yscale="log", xlabel="rate of each host's link", ylabel="speed-up over dense f32")
        axis.set_xticks(rates, [rate_words(rate) for rate in rates])
        axis.minorticks_off()
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
        axis.set_yticks([tick for tick in (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if _within(tick, of_model)])
        axis.set_title(f"{model}, {hosts} hosts")
        axis.grid(alpha=0.3)
    if axes[0][0].get_lines():
        axes[0][0].legend(fontsize="small")
    figure.savefig(paths[0], dpi=130)
    plt.close(figure)

    shape = (len(models), len(rates))
    size = (max(4.2 * len(rates) + 1.5, 8.0), 3.2 * len(models) + 0.8)
    figure, axes = plt.subplots(*shape, figsize=size, squeeze=False, layout="constrained", sharey=True)
    methods = [method for method in _ordered_methods(mine) if method[0] != "none"]
    for model, line in zip(models, axes, strict=True):
        for rate, axis in zip(rates, line, strict=True):
            _bars(axis, [row for row in mine if _network(row) == (model, hosts, rate)], methods)
            axis.set_title(f"{model}, {hosts}×{rate_words(rate)}")
    for axis in axes[-1]:
        axis.set_xlabel("ms a step")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in PARTS.values()]
    figure.legend(handles, PARTS, loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(paths[1], dpi=130)
    plt.close(figure)
    return paths


def _within(tick: float, rows: list[Row]) -> bool:
    gains = [row["speedup"] for row in rows] or [1.0]
    return min(*gains, 1.0) / 1.6 <= tick <= max(*gains, 1.0) * 1.6


def _bars(axis, rows: list[Row], methods: list[tuple]) -> None:
    """One bar a method. Dense f32 is cut off where it would dwarf the others, its time stands beside it."""
    by_method = {_method(row): row for row in rows if row["no_communication_ms"] is not None}
    others = [row["step_ms"] for method, row in by_method.items() if method[0] not in ("dense", "none")]
    limit = 1.25 * min(
        max((row["step_ms"] for row in by_method.values()), default=1.0), 2 * max(others, default=float("inf"))
    )
    for place, method in enumerate(methods):
        row = by_method.get(method)
        if row is None:
            continue
        left = 0.0
        for part, value in bar(row).items():
            axis.barh(place, value, left=left, color=PARTS[part])
            left += value
        axis.text(min(left, 0.8 * limit), place, f" {row['step_ms']:.1f}", va="center", fontsize="small")
    axis.set_xlim(0, limit)
    axis.set_yticks(range(len(methods)), [_words(method) for method in methods])
    axis.set_ylim(len(methods) - 0.4, -0.6)


def write(runs: list[dict], folder: Path) -> list[Row]:
    """Writes everything and returns the rows."""
    rows = results(runs)
    (folder / "results.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "table.md").write_text(table(rows), encoding="utf-8")
    if rows:
        plot(rows, folder)
    return rows
