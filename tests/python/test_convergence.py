"""The convergence benchmark: a short run, the check of conservation, and what the report makes of runs."""

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import thinwire

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

convergence, report, tasks, workers = map(
    importlib.import_module, ("convergence", "convergence_report", "convergence_tasks", "convergence_workers")
)


def start(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(BENCH / "convergence.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)


@pytest.fixture(scope="module")
def images() -> None:
    try:
        tasks.fashion_mnist_data.locate()
    except tasks.fashion_mnist_data.DatasetError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def quick(images: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and output of one run."""
    folder = tmp_path_factory.mktemp("convergence")
    done = start("--quick", "--out", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def test_quick_run_writes_everything(quick: tuple[Path, str]) -> None:
    folder, output = quick
    rows = json.loads((folder / "results.json").read_text())
    assert [(row["method"], row["variant"]) for row in rows] == [("dense", ""), ("top_k", ""), ("redsync", "switch")]
    dense, top_k, switch = rows
    for row in rows:
        assert (row["task"], row["seed"], row["steps"], row["parameters"]) == ("T1s", 1, 30, 204_778)
        assert row["metric"] == "test accuracy" and 20 < row["value"] < 95 and row["dense_mean"] == dense["value"]
    block = 4 * (204_778 - 200_704) + 8 * 201  # all but the first linear layer travel whole
    assert top_k["bytes_sent_per_step"] == pytest.approx(3 * block, rel=0.02) and top_k["ranks"] == 4
    assert top_k["density_sent"] == pytest.approx(0.001, rel=0.01)
    assert [one["after_step"] for one in switch["switch"]["switches"]] == [10, 20]
    assert (folder / "T1s.png").stat().st_size > 5000
    curves = json.loads((folder / "curves.json").read_text())
    assert [step for step, _ in curves[0]["loss_curve"]] == [10, 20, 30]
    assert output.count("min left") == 3 and "| top_k | 0.1 % | 4 |" in output
    assert (folder / "table.md").read_text(encoding="utf-8") in output


def test_what_is_done_is_not_run_again(quick: tuple[Path, str]) -> None:
    folder, _ = quick
    files = sorted((folder / "runs").iterdir())
    assert len(files) == 3
    before = [(file.name, file.stat().st_mtime_ns) for file in files]
    done = start("--quick", "--out", str(folder))
    assert done.returncode == 0 and "3 runs, 3 of them done already" in done.stdout and "min left" not in done.stdout
    assert [(file.name, file.stat().st_mtime_ns) for file in sorted((folder / "runs").iterdir())] == before
    assert done.stderr == ""


def test_runs_of_another_build_are_named(quick: tuple[Path, str]) -> None:
    folder, _ = quick
    file = next((folder / "runs").glob("*dense*"))
    text = file.read_text()
    file.write_text(json.dumps(json.loads(text) | {"digest": "another"}))
    done = start("--quick", "--report", "--out", str(folder))
    file.write_text(text)
    assert done.returncode == 0 and "1 of 3 runs were made with another thinwire" in done.stderr


def test_interrupted_run_is_made_again(quick: tuple[Path, str], tmp_path: Path) -> None:
    runs = convergence.Runs(tmp_path, quick=False)
    job = tasks.Job("T1s", "top_k", 0.001, 4, 1)
    assert runs.read(job) is None
    done = {"task": "T1s", "method": "top_k", "density": 0.001, "ranks": 4, "seed": 1, "variant": "", "quick": False}
    done |= {"value": 90.0, "digest": "0", "losses": [], "metric_curve": []}
    for damaged in ('{"task": "T1s", "meth', "[]", "null", '"x"', json.dumps({"task": "T1s"}), "\x00"):
        (tmp_path / f"{job.name()}.json").write_text(damaged)
        assert runs.read(job) is None, damaged
    (tmp_path / f"{job.name()}.json").write_bytes(b"\xff\xfe")
    assert runs.read(job) is None
    runs.write(job, done | {"quick": True})
    assert runs.read(job) is None, "a quick run is no measurement"
    runs.write(job, done)
    assert runs.read(job)["seed"] == 1 and len(list(tmp_path.iterdir())) == 1
    assert runs.read(tasks.Job("T1s", "top_k", 0.001, 4, 2)) is None


def test_workers_train_as_dense_does_until_compression_starts(quick: tuple[Path, str]) -> None:
    folder, _ = quick
    losses = {}
    for file in (folder / "runs").iterdir():
        measured = json.loads(file.read_text())
        losses[measured["method"]] = measured["losses"]
    for method in ("top_k", "redsync"):  # 10 dense steps; the 11th loss is that of the weights they made
        np.testing.assert_allclose(losses[method][:11], losses["dense"][:11], rtol=1e-3)
        assert abs(losses[method][14] - losses["dense"][14]) > 1e-3


RANKS = 3
PLACES = [workers.Place("small", 0, 50), workers.Place("large", 50, 2050), workers.Place("other", 2050, 3050)]
METHODS = {
    "top_k": lambda: thinwire.top_k(0.01),
    "redsync": lambda: thinwire.redsync(0.01),
    "redsync_quantized": lambda: thinwire.redsync_quantized(0.01),
    "dragonn": lambda: thinwire.dragonn(0.01),
    "dragonn_a": lambda: thinwire.dragonn(0.01, layout="a"),
    "dgc": lambda: thinwire.dgc(0.01),
}


def options_of(method: str, momentum: float = 0.9) -> thinwire.ReducerOptions:
    options = METHODS[method]()
    options.momentum, options.dense_below = momentum, 100
    options.schedule = thinwire.Schedule(dense_steps=2)
    return options


def gradients(step: int) -> torch.Tensor:
    return torch.randn(RANKS, PLACES[-1].end, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_books_are_kept(method: str, momentum: float) -> None:
    team = workers.Workers(options_of(method, momentum), PLACES, RANKS)
    for step in range(12):
        team.reduce(gradients(step), "dense" if step == 10 else "scheduled", check=True)
    team.flush(PLACES[-1].end)
    team.close()


class Wrong:
    """A reducer whose residual reads wrong in one element of a parameter."""

    def __init__(self, reducer: thinwire.Reducer, change: float) -> None:
        self._reducer, self._change = reducer, change

    def __getattr__(self, name: str):
        return getattr(self._reducer, name)

    def residual(self, name: str) -> np.ndarray:
        values = np.from_dlpack(self._reducer.residual(name)).copy()
        if name == "large" and self._reducer.stats().step == 5:
            values[7] += self._change
        return values


def test_a_residual_that_lost_something_is_found() -> None:
    team = workers.Workers(options_of("top_k"), PLACES, RANKS)
    team._reducers[1] = Wrong(team._reducers[1], 1e-3)
    for step in range(5):
        team.reduce(gradients(step), check=True)
    with pytest.raises(workers.ConservationError, match="step 5, parameter 'large': at element 7 the 3 workers took"):
        team.reduce(gradients(5), check=True)
    team.close()


def one_step() -> dict:
    """The arguments of a check that holds."""
    team = workers.Workers(options_of("top_k"), PLACES, RANKS)
    for step in range(4):
        team.reduce(gradients(step))
    brought = gradients(4)
    found = {"options": options_of("top_k"), "places": PLACES, "gradients": brought.numpy().copy()}
    found["before"] = [team._state(reducer) for reducer in team._reducers]
    found["stats"] = team.reduce(brought)
    found["after"] = [team._state(reducer) for reducer in team._reducers]
    found["means"] = brought.numpy()
    team.close()
    workers.check_step(**found)
    return found


def test_wrong_means_are_found() -> None:
    step = one_step()
    step["means"][1, 100] += 1e-6
    with pytest.raises(workers.ConservationError, match="means of workers 0 and 1 differ"):
        workers.check_step(**step)
    for element, change in ((60, 1e-6), (10, 1e-5)):  # one that nobody sent, one of a tensor that travels whole
        step = one_step()
        step["means"][:, element] += change
        with pytest.raises(workers.ConservationError, match="the mean is"):
            workers.check_step(**step)


def test_changes_beyond_what_was_sent_are_found() -> None:
    step = one_step()
    step["stats"] = [Stats(one) for one in step["stats"]]
    with pytest.raises(workers.ConservationError, match=r"worker 0 changed \d+ elements of its residuals, but says"):
        workers.check_step(**step)


class Stats:
    """Stats of a worker that says it sent one entry."""

    entries_sent = 1

    def __init__(self, stats: thinwire.StepStats) -> None:
        self.step, self.clip_factor, self.sparse_numel = stats.step, stats.clip_factor, stats.sparse_numel


def test_clipping_is_known_to_the_check() -> None:
    options = options_of("top_k", 0.0)
    options.clip_norm = 0.5
    row = np.array([3.0, 4.0], np.float32)
    assert workers.clip_factor(options, row, 4) == pytest.approx(0.2)
    assert workers.clip_factor(options, row / 10, 4) == 1.0
    team = workers.Workers(options, PLACES, RANKS)
    for step in range(6):
        scale = 1e-4 if step % 2 else 1.0
        team.reduce(scale * gradients(step), check=True)
    team.close()


def run_of(method: str, value: float, seed: int = 1, **changes: object) -> dict:
    dense = method == "dense"
    return {
        "task": "T1s",
        "method": method,
        "density": 1.0 if dense else 0.001,
        "ranks": 1 if dense else 4,
        "seed": seed,
        "variant": "",
        "metric": "test accuracy",
        "value": value,
        "steps": 400,
        "parameters": 204_778,
        "dense_bytes_per_step": 0.0 if dense else 1_000_000.0,
        "bytes_sent_per_step": None if dense else 50_000.0,
        "density_sent": 1.0 if dense else 0.001,
        "metric_curve": [[200, value - 3], [400, value]],
        "losses": [2.3 * 0.99**step for step in range(400)],
        "digest": "0",
    } | changes


@pytest.fixture
def runs() -> list[dict]:
    values = {"dense": (90.0, 90.4, 90.2), "top_k": (89.9, 90.3, 90.1), "dragonn": (89.5, 89.7, 89.6)}
    made = [run_of(method, value, seed) for method, of in values.items() for seed, value in enumerate(of, 1)]
    made += [run_of("top_k", value, variant=report.CONTROL) for value in (87.0, 87.4)]
    words = {"task": "T2", "metric": "validation perplexity"}
    made += [run_of("dense", 80.0, **words), run_of("redsync", 82.0, **words, density=0.01)]
    return made


def test_gaps_gates_and_spreads(runs: list[dict]) -> None:
    rows = {(row["task"], row["method"], row["variant"]): row for row in report.summaries(runs)}
    top_k, dragonn = rows["T1s", "top_k", ""], rows["T1s", "dragonn", ""]
    assert (top_k["gap"], top_k["gap_spread"]) == (pytest.approx(0.1), pytest.approx(0.4))
    assert (top_k["gate"], top_k["held"], top_k["seeds"]) == ("≤ 0.5", True, 3)
    assert dragonn["gap"] == pytest.approx(0.6) and dragonn["held"] is False
    control = rows["T1s", "top_k", report.CONTROL]
    assert control["gap"] == pytest.approx(3.0) and (control["gate"], control["held"]) == ("≥ 1.5", True)
    words = rows["T2", "redsync", ""]
    assert words["gap"] == pytest.approx(2.5) and (words["gate"], words["held"]) == ("≤ 3.0", True)
    assert rows["T1s", "dense", ""]["held"] is None
    text = report.table(runs, "command")
    assert "| top_k | 0.1 % | 4 | 90.10 | +0.10 | 0.40 | ≤ 0.5 | yes | 50.0 kB | 5.00 % | 3 |" in text
    assert "| +0.60 | 0.20 | ≤ 0.5 | **NO** |" in text and "3 of 4 gates were held" in text


def test_gates_are_those_of_the_cells() -> None:
    cells = set(convergence.CELLS)
    for gate in report.GATES:
        for method in gate.methods:
            assert (gate.task, method, gate.density, gate.ranks, gate.variant) in cells, (gate, method)
    jobs = convergence.jobs_of(convergence.CELLS, 3)
    assert len(jobs) == len(set(jobs)) == 3 * len(convergence.CELLS) == 3 * len(cells)
    assert len({job.name() for job in jobs}) == len(jobs)
    assert [job.method for job in jobs[:3]] == ["dense"] * 3
    slow = [job.task == "T3" for job in jobs]
    assert any(slow) and slow == sorted(slow)
    compressed = [job for job in jobs if job.method != "dense" and job.task != "T3"]
    gated = [report.gate_of(report.cell_of(vars(job))) is not None for job in compressed]
    assert gated[0] and not gated[-1]


def test_results_have_what_they_are_compared_with(runs: list[dict], tmp_path: Path) -> None:
    report.write(runs, tmp_path, "command")
    rows = json.loads((tmp_path / "results.json").read_text())
    assert len(rows) == len(runs) and {row["dense_mean"] for row in rows if row["task"] == "T1s"} == {90.2}
    assert not any("losses" in row for row in rows)
    names = {"results.json", "curves.json", "table.md", "T1s.png", "T2.png"}
    assert {file.name for file in tmp_path.iterdir()} == names


@pytest.mark.parametrize(("rise", "held"), [(0.0, (True, True)), (0.2, (False, True)), (-0.2, (True, True))])
def test_a_jump_of_the_loss_at_a_switch_is_seen(rise: float, held: tuple[bool, bool]) -> None:
    losses = [1.0] * 400
    runs = [run_of("dense", 90.0, seed, losses=[x + 0.05 * seed for x in losses]) for seed in (1, 2, 3)]
    for seed in (1, 2, 3):
        switched = [1.0 + 0.05 * seed + (rise if step >= 100 else 0.0) for step in range(400)]
        runs.append(run_of("top_k", 90.0, seed, variant="switch", losses=switched, switched_after=[100, 300]))
    verdict = report.switch_verdict(runs)
    assert tuple(switch["held"] for switch in verdict["switches"]) == held
    assert verdict["switches"][0]["jump"] == pytest.approx(rise)
    assert verdict["switches"][0]["dense_spread"] == pytest.approx(0.1)
    assert report.results(runs)[-1]["switch"]["held"] is (rise <= 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--report", "--out", "/nowhere/at/all"], "nothing was measured in /nowhere/at/all"),
        (["--seeds", "0"], "--seeds must be at least 1"),
        (["--quick", "--tasks", "T2"], "--quick has runs of T1s only"),
        (["--quick", "--out", "/proc/nope"], "cannot be made"),
        (["--methods", "fast"], "invalid choice: 'fast'"),
    ],
)
def test_bad_input_gives_one_sentence(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["convergence.py", *arguments])
    try:
        status = convergence.main()
    except SystemExit as error:
        status = error.code
    assert status != 0 and words in capsys.readouterr().err


def test_list_tells_what_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["convergence.py", "--list", "--tasks", "T2", "--out", str(tmp_path)])
    begin = time.monotonic()
    assert convergence.main() == 0 and time.monotonic() - begin < 10
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("T2 dense, seed 1: to do") and lines[-1].split()[1] == "runs;"
