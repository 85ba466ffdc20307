"""What the demo makes of its runs: figures by method, the table, the curves and report.html."""

import base64
import html
from pathlib import Path
from typing import Any

Run = dict[str, Any]  # one entry of what fashion_mnist.py writes

LABELS = {"redsync": "RedSync", "dragonn": "DRAGONN", "no error feedback": "no error feedback"}
COLOURS = {"dense": "#333333", "redsync": "#0072b2", "dragonn": "#d98200", "no error feedback": "#c23b75"}
NETWORKS = {"100 Mbit/s": 100e6, "1 Gbit/s": 1e9, "10 Gbit/s": 10e9}
LATENCY = 50e-6  # seconds of one message round


def label(run: Run) -> str:
    """The method's name for people."""
    return LABELS.get(run["method"], run["method"])


def share_of_dense(run: Run) -> float:
    """Bytes sent in percent of what a dense all-reduce sends."""
    return 100 * run["bytes_sent_per_step"] / run["dense_bytes_per_step"]


def computed_step_ms(run: Run, compute_ms: float, buckets: int, bits_per_second: float) -> float:
    """Step time in ms by a plain latency-bandwidth formula, nothing overlapping, each rank on a link of its own:

    compute + compression + buckets · rounds · latency + bytes sent / bandwidth, where a ring all-gather takes P - 1
    rounds and a ring all-reduce 2 (P - 1).
    """
    rounds = (run["ranks"] - 1) * (2 if run["method"] == "dense" else 1)
    communication = buckets * rounds * LATENCY + 8 * run["bytes_sent_per_step"] / bits_per_second
    return compute_ms + run["compress_ms"] + 1e3 * communication


def results(runs: list[Run]) -> list[Run]:
    """The runs with their computed step times and without their curves."""
    compute_ms = next((run for run in runs if run["method"] == "dense"), runs[0])["compute_ms"]
    buckets = max(1, *(run["buckets"] for run in runs))
    rows = []
    for run in runs:
        row = {key: value for key, value in run.items() if not key.endswith("_curve")}
        row["computed_step_ms"] = {
            network: computed_step_ms(run, compute_ms, buckets, bandwidth) for network, bandwidth in NETWORKS.items()
        }
        row["computed_with"] = {"compute_ms": compute_ms, "buckets": buckets, "latency_us": 1e6 * LATENCY}
        rows.append(row)
    return rows


def headings() -> list[tuple[str, str]]:
    """The table's columns, two lines each."""
    step_times = [("step time*", network) for network in NETWORKS]
    return [
        ("", "method"),
        ("test", "accuracy"),
        ("sent a step", "and rank"),
        ("of", "dense"),
        ("compress", "a step"),
        *step_times,
    ]


def cells(row: Run) -> list[str]:
    """One line of the table."""
    return [
        label(row),
        f"{row['test_accuracy']:.2f} %",
        f"{row['bytes_sent_per_step'] / 1e3:,.1f} kB",
        f"{share_of_dense(row):.3g} %",
        "–" if row["method"] == "dense" else f"{row['compress_ms']:.2f} ms",
        *(f"{value:.1f} ms" for value in row["computed_step_ms"].values()),
    ]


def title(row: Run) -> str:
    """What was run, in one line."""
    return (
        f"Fashion-MNIST, {row['parameters']:,} parameters, {row['ranks']} ranks, {row['steps']:,} steps of 128 images, "
        f"seed {row['seed']}"
    )


def footnotes(rows: list[Run]) -> list[str]:
    """How the table's figures came about, one sentence or two each."""
    used = rows[0]["computed_with"]
    sparse = next((row for row in rows if row["method"] != "dense"), rows[0])
    return [
        "* Computed, not measured: compute + compression + communication, nothing overlapping. Compute is the CPU time "
        f"of one rank's forward, backward and optimizer step ({used['compute_ms']:.1f} ms, median). Communication is "
        f"{used['buckets']} buckets · rounds · {used['latency_us']:.0f} µs + bytes sent / bandwidth, with P−1 rounds "
        "for an all-gather and 2(P−1) for a dense all-reduce, each rank on a link of its own.",
        f"The compressed methods send {100 * sparse['density']:g} % of each large tensor and all of the small ones. "
        "Bytes sent is their mean over the sparse steps, counted at the communicator; the "
        f"{sparse['dense_steps']} dense steps at the start come on top. For dense it is 2(P−1)/P·4n, as a ring "
        "all-reduce sends.",
        "Compress is accumulate, select, encode and decode: the median of the sparse steps, while all ranks share "
        "this machine's cores.",
    ]


def table(rows: list[Run]) -> str:
    """The table as text."""
    lines = [[first for first, _ in headings()], [second for _, second in headings()], *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for first, *others in lines:
        padded = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        text.append("  ".join([first.ljust(widths[0]), *padded]))
    return "\n".join([*text[:2], "─" * len(text[0]), *text[2:]])


def plot(runs: list[Run], folder: Path) -> list[Path]:
    """Writes loss.png and accuracy.png and returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e8e8e8"}
    style |= {"axes.edgecolor": "#999999", "axes.titlelocation": "left", "axes.titlesize": 11, "legend.frameon": False}
    start = min(run["dense_steps"] for run in runs)
    paths = []
    with plt.rc_context(style):
        for name, heading in (("loss", "Training loss, means of 25 steps"), ("accuracy", "Test accuracy, %")):
            figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
            for run in runs:
                if name == "loss":
                    steps, values, text = *window_means(run["loss_curve"], 25), label(run)
                else:
                    steps, values = zip(*run["accuracy_curve"], strict=True)
                    text = f"{label(run)}  {values[-1]:.2f} %"
                marker = "o" if name == "accuracy" else None
                axes.plot(steps, values, label=text, color=COLOURS.get(run["method"]), marker=marker, markersize=4)
            axes.axvline(start, color="#999999", linestyle=":", linewidth=1)
            axes.annotate("compression starts", (start, 0.98), (4, 0), xycoords=("data", "axes fraction"),
                          textcoords="offset points", va="top", fontsize=8, color="#666666")  # fmt: skip
            axes.set(title=heading, xlabel="step", xlim=(0, None))
            if name == "loss":
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
                axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:g}"[-1] in "235" else "")
            axes.legend(loc="upper right" if name == "loss" else "lower right")
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1], dpi=160)
            plt.close(figure)
    return paths


def window_means(values: list[float], width: int) -> tuple[list[float], list[float]]:
    """Means of adjoining windows and the steps at their middles, without a last one of less than half the width."""
    windows = [values[begin : begin + width] for begin in range(0, len(values), width)]
    if len(windows) > 1 and 2 * len(windows[-1]) < width:
        windows.pop()
    middles = [width * i + len(window) / 2 for i, window in enumerate(windows)]
    return middles, [sum(window) / len(window) for window in windows]


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>thinwire demo</title>
<style>
  body {{ font: 16px/1.5 system-ui, sans-serif; color: #222; background: #f6f7f9; margin: 0; }}
  main {{ max-width: 62rem; margin: 0 auto; padding: 2rem 1.25rem 3rem; }}
  h1 {{ font-size: 1.6rem; margin: 0; }}
  .lead {{ color: #555; margin: .25rem 0 1.5rem; }}
  section {{ background: #fff; border: 1px solid #e3e5e8; border-radius: 10px; }}
  section {{ padding: 1rem 1.25rem; margin: 0 0 1.25rem; overflow-x: auto; }}
  table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
  th, td {{ padding: .45rem .6rem; text-align: right; white-space: nowrap; }}
  th {{ font-weight: 600; font-size: .82rem; color: #555; vertical-align: bottom; border-bottom: 2px solid #d5d8dc; }}
  td {{ border-bottom: 1px solid #eceef0; }}
  tr:last-child td {{ border-bottom: 0; }}
  th:first-child, td:first-child {{ text-align: left; }}
  .dot {{ display: inline-block; width: .7rem; height: .7rem; border-radius: 50%; margin-right: .5rem; }}
  .bar {{ height: .35rem; border-radius: 2px; margin-top: .2rem; }}
  .held::before {{ content: "✓ "; color: #1a7f37; }} .missed::before {{ content: "✗ "; color: #c62828; }}
  ul {{ list-style: none; margin: 0; padding: 0; }}
  .notes {{ font-size: .85rem; color: #555; }} .notes p {{ margin: 0 0 .6rem; }} .notes p:last-child {{ margin: 0; }}
  .curves {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(24rem, 1fr)); gap: 1rem; }}
  img {{ width: 100%; height: auto; }}
</style>
</head>
<body>
<main>
<h1>{heading}</h1>
<p class="lead">{lead}</p>
<section><table>
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table></section>
{checks}
<section class="curves">{images}</section>
<section class="notes">{notes}</section>
</main>
</body>
</html>
"""


def write_report(path: Path, rows: list[Run], images: list[Path], checks: list[tuple[str, bool]], setting: str) -> None:
    """Writes report.html, which needs no other file.

    checks: what was expected of the run, each with whether it held. setting: the machine and the versions.
    """
    head = "".join(f"<th>{first}<br>{second}</th>" for first, second in headings())
    body = []
    for row in rows:
        name, accuracy, sent, *others = map(html.escape, cells(row))
        colour = COLOURS.get(row["method"], "#888888")
        bar = f'<div class="bar" style="background:{colour};width:{max(1.0, share_of_dense(row)):.1f}%"></div>'
        name = f'<span class="dot" style="background:{colour}"></span>{name}'
        body.append("<tr>" + "".join(f"<td>{c}</td>" for c in (name, accuracy, sent + bar, *others)) + "</tr>")
    items = "".join(f'<li class="{"held" if held else "missed"}">{html.escape(text)}</li>' for text, held in checks)
    data = [(image.stem, base64.b64encode(image.read_bytes()).decode()) for image in images]
    path.write_text(
        _PAGE.format(
            heading="thinwire: the same training, a fraction of the bytes",
            lead=html.escape(title(rows[0])),
            head=head,
            body="\n".join(body),
            checks=f"<section><ul>{items}</ul></section>" if checks else "",
            images="".join(f'<img alt="{stem} by step" src="data:image/png;base64,{code}">' for stem, code in data),
            notes="".join(f"<p>{html.escape(note)}</p>" for note in [*footnotes(rows), setting]),
        ),
        encoding="utf-8",
    )
