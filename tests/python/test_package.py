"""The package without PyTorch: options, presets, errors, the reducer on threads."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import as_threads

import thinwire
from thinwire import (
    Codec,
    HashedSlots,
    ParameterRule,
    ReducerOptions,
    SampledTopK,
    Schedule,
    ThresholdSearch,
    TopK,
    TrimmedTopK,
)

densities = st.floats(1e-6, 1.0)
fractions = st.floats(1e-3, 0.999)
selectors = st.one_of(
    st.builds(TopK, densities),
    st.builds(TrimmedTopK, densities, fractions),
    st.builds(HashedSlots, densities, st.sampled_from("ab"), fractions),
    st.builds(ThresholdSearch, densities, st.integers(1, 2**32 - 1)),
    st.builds(SampledTopK, densities, fractions),
)
f32 = st.floats(0, 0.984375, width=32)
rules = st.builds(
    ParameterRule,
    st.text(min_size=1),
    dense=st.none() | st.booleans(),
    momentum=st.none() | f32,
    nesterov=st.none() | st.booleans(),
    selector=st.none() | selectors,
    values=st.none() | st.sampled_from(["f32", "bf16", "f16", "shared_mean"]),
)
value_codings = st.sampled_from(["f32", "bf16", "f16", "shared_mean"])
codecs = st.builds(Codec, st.sampled_from(["raw_u32", "elias_fano"]), value_codings)
options = st.builds(
    ReducerOptions,
    selector=selectors,
    selector_by_size=st.lists(st.tuples(st.integers(0, 2**40), selectors), max_size=3),
    unit=st.sampled_from(["parameter", "bucket"]),
    codec=codecs,
    all_reduce=st.sampled_from(["all_gather", "dense"]),
    momentum=f32,
    nesterov=st.booleans(),
    momentum_masking=st.booleans(),
    error_feedback=st.booleans(),
    rounding_feedback=st.booleans(),
    residual_decay=f32,
    clip_norm=f32,
    dense_below=st.integers(0, 2**40),
    rules=st.lists(rules, max_size=3),
    schedule=st.builds(Schedule, st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 2**32 - 1)),
    seed=st.integers(0, 2**64 - 1),
)


@given(options)
def test_options_survive_copy_pickle_and_repr(o: ReducerOptions) -> None:
    for twin in (copy.copy(o), copy.deepcopy(o), pickle.loads(pickle.dumps(o))):
        assert twin == o
        assert twin is not o
        twin.seed ^= 1
        assert twin != o
    again = eval(repr(o), vars(thinwire))
    again.momentum, again.residual_decay, again.clip_norm = o.momentum, o.residual_decay, o.clip_norm
    assert again.selector == o.selector
    assert repr(again) == repr(o)


def test_presets() -> None:
    assert thinwire.top_k(0.01).selector == TopK(0.01)
    assert thinwire.top_k().unit == "bucket"
    assert thinwire.redsync(0.002).selector == TopK(0.002)
    assert thinwire.redsync(0.002).selector_by_size == (
        (131072, TrimmedTopK(0.002)),
        (4194304, ThresholdSearch(0.002)),
    )
    assert [above for above, _ in thinwire.redsync(limits="bytes").selector_by_size] == [32768, 1048576]
    quantized = thinwire.redsync_quantized(output_layer=["decoder.*"])
    assert quantized.codec.values == "shared_mean" and quantized.rounding_feedback
    assert quantized.rules == (ParameterRule("decoder.*", values="f32"),)
    assert thinwire.dragonn(small_density=0.05, small=1000).selector.density == 0.05
    assert thinwire.dragonn(small_density=0.05, small=1000).selector_by_size == ((1000, HashedSlots(0.001)),)
    assert thinwire.dgc(0.01).selector == SampledTopK(0.01)
    assert thinwire.redsync().unit == "parameter"
    assert thinwire.dragonn().selector.layout == "b"
    assert thinwire.dragonn(0.01, layout="a").selector.layout == "a"
    assert thinwire.dense().all_reduce == "dense"
    assert thinwire.redsync().momentum_masking
    assert "density=0.001" in str(thinwire.top_k())
    assert thinwire.redsync().codec == Codec("raw_u32", "f32")


def test_changes_do_not_get_lost() -> None:
    o = thinwire.redsync()
    with pytest.raises(AttributeError):
        o.selector.density = 0.5
    with pytest.raises(AttributeError):
        o.rules.append(ParameterRule("*"))
    with pytest.raises(AttributeError):
        o.codec.values = "bf16"
    o.codec = Codec(indices="elias_fano", values="bf16")
    assert (o.codec.indices, o.codec.values) == ("elias_fano", "bf16")
    assert "codec=elias_fano x bf16" in str(o)
    o.rules = [ParameterRule("*.bias", dense=True)]
    o.schedule = Schedule(dense_steps=7)
    o.selector_by_size = [(10, TopK(0.5))]
    assert o.selector_by_size == ((10, TopK(0.5)),)
    assert Schedule.in_epochs(100, dense_epochs=0.5, ramp_epochs=4) == Schedule(50, 400, 4)
    assert [round(Schedule(2, 4, 4).density_at(step, 0.001), 4) for step in range(1, 7)] == [
        1.0,
        0.2512,
        0.0631,
        0.0158,
        0.004,
        0.001,
    ]
    assert o.rules == (ParameterRule("*.bias", dense=True),)
    assert o.schedule.dense_steps == 7
    with pytest.raises(AttributeError):
        o.no_such_option = 1


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: thinwire.top_k(0.0), "density of TopK is 0, not in (0, 1]"),
        (lambda: thinwire.redsync(1.5), "density of TopK is 1.5, not in (0, 1]"),
        (lambda: ThresholdSearch(reuse_interval=0), "reuse_interval of ThresholdSearch is 0, not at least 1"),
        (lambda: SampledTopK(sample_fraction=0), "sample_fraction of SampledTopK is 0, not in (0, 1]"),
        (lambda: HashedSlots(layout="c"), "layout is 'c', expected 'a' or 'b'"),
        (lambda: ReducerOptions(unit="model"), "unit is 'model', expected 'parameter' or 'bucket'"),
        (lambda: ReducerOptions(momentum=1.0).validate(), "momentum is 1.0"),
        (lambda: Codec(indices="zip"), "indices is 'zip', expected 'raw_u32' or 'elias_fano'"),
        (lambda: Codec(values="f64"), "values is 'f64', expected 'f32' or 'bf16' or 'f16' or 'shared_mean'"),
        (lambda: thinwire.redsync(limits="MB"), "limits is 'MB', expected 'elements' or 'bytes'"),
        (lambda: ParameterRule("*", values="f64"), "values is 'f64'"),
        (lambda: ReducerOptions(clip_norm=-1).validate(), "clip_norm is -1"),
        (lambda: ReducerOptions(residual_decay=0).validate(), "residual_decay is 0, not in (0, 1]"),
        (
            lambda: ReducerOptions(rounding_feedback=False).validate(),
            "rounding_feedback is off but codec.values is f32",
        ),
        (
            lambda: ReducerOptions(selector=ThresholdSearch(), codec=Codec(values="shared_mean")).validate(),
            "reuse_interval of ThresholdSearch must be 1",
        ),
        (lambda: Schedule.in_epochs(0), "steps_per_epoch is 0"),
        (
            lambda: ReducerOptions(selector=HashedSlots(layout="a"), codec=Codec("elias_fano")).validate(),
            "elias_fano needs ascending indices",
        ),
        (lambda: thinwire.make_thread_communicators(0), "at least one rank"),
        (lambda: thinwire.make_thread_communicators(2, timeout=0), "must be positive"),
    ],
)
def test_bad_options(call, sentence: str) -> None:
    with pytest.raises(thinwire.Error) as caught:
        call()
    assert sentence in str(caught.value)
    assert caught.value.code is thinwire.ErrorCode.invalid_argument
    assert caught.value.position is None


def test_errors_can_be_sent_to_other_processes() -> None:
    error = pickle.loads(pickle.dumps(thinwire.Error("corrupt_payload", "a byte", 17)))
    assert (error.code, str(error), error.position) == ("corrupt_payload", "a byte", 17)
    assert isinstance(error, RuntimeError)


@pytest.mark.parametrize(
    "codec", [Codec(), Codec("elias_fano", "bf16"), Codec("elias_fano", "f16")], ids=lambda c: f"{c.indices}_{c.values}"
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_reducer_on_threads(dtype: str, codec: Codec) -> None:
    n, steps = 5000, 6
    o = thinwire.top_k(0.01)
    o.dense_below = 100
    o.codec = codec

    def train(c: thinwire.Communicator) -> tuple:
        reducer = thinwire.Reducer(o, [("w", n), ("b", 10)], c)
        inputs, outputs = np.zeros(n + 10), np.zeros(n + 10)
        events = []
        for step in range(steps):
            g = np.random.default_rng(100 * c.rank() + step).standard_normal(n + 10).astype(dtype)
            inputs += g
            reducer.begin_step()
            work = reducer.reduce([("w", n, True), ("b", 10, True)], g, lambda error: events.append(error))
            work.wait()
            assert work.done()
            outputs += g
        state = reducer.state()
        assert state["step"] == steps
        residual = np.from_dlpack(state["residual"]["w"])
        assert np.array_equal(residual, np.from_dlpack(reducer.residual("w")))
        assert reducer.stats().calls == 1
        assert events == [None] * steps
        reducer.close()
        reducer.close()
        return inputs, outputs, residual

    results = as_threads(thinwire.make_thread_communicators(3), train)
    assert all(np.array_equal(results[0][1], r[1]) for r in results)
    imbalance = 3 * results[0][1] - sum(r[0] for r in results)
    imbalance[:n] += sum(r[2] for r in results)
    assert np.abs(imbalance).max() < (1e-5 if dtype == "float32" else 3e-2)


def test_what_is_wrong_with_a_gradient_reaches_every_rank() -> None:
    backing = np.zeros(20, dtype=np.float32)
    frozen = np.zeros(10, dtype=np.float32)
    cases = {
        "float64": np.zeros(10),
        "not contiguous": backing[::2],
        "2 dimensions": np.zeros((2, 5), dtype=np.float32),
        "11 elements": np.zeros(11, dtype=np.float32),
    }
    for word, gradient in cases.items():

        def step(c: thinwire.Communicator, gradient: np.ndarray = gradient) -> str:
            reducer = thinwire.Reducer(thinwire.dense(), [("w", 10)], c)
            reducer.begin_step()
            mine = gradient if c.rank() == 1 else np.zeros(10, dtype=np.float32)
            with pytest.raises(thinwire.Error) as caught:
                reducer.reduce([("w", 10, True)], mine).wait()
            return str(caught.value)

        for sentence in as_threads(thinwire.make_thread_communicators(2), step):
            assert word in sentence
            assert "rank 1" in sentence
    frozen.flags.writeable = False
    reducer = thinwire.Reducer(thinwire.dense(), [("w", 10)], thinwire.make_thread_communicators(1)[0])
    reducer.begin_step()
    with pytest.raises(TypeError):
        reducer.reduce([("w", 10, True)], frozen)
    with pytest.raises(thinwire.Error, match="mode is 'often'"):
        reducer.begin_step("often")


def test_velocities_and_state() -> None:
    o = thinwire.dense()
    o.momentum = 0.5
    reducer = thinwire.Reducer(o, [("w", 3)], thinwire.make_thread_communicators(1)[0])
    reducer.set_velocity("w", np.array([4, 2, 0], dtype=np.float32))
    with pytest.raises(thinwire.Error, match="'x'"):
        reducer.set_velocity("x", np.zeros(3, dtype=np.float32))
    g = np.ones(3, dtype=np.float32)
    reducer.begin_step()
    reducer.reduce([("w", 3, True)], g).wait()
    assert g.tolist() == [3, 2, 1]
    assert np.from_dlpack(reducer.velocity("w")).tolist() == [3, 2, 1]
    reducer.load(41, {"w": np.zeros(3, np.float32)}, {"w": np.full(3, 2, np.float32)})
    assert reducer.step == 41
    with pytest.raises(thinwire.Error, match="residual of 'w' is not a contiguous"):
        reducer.load(41, {"w": np.zeros(3)}, {})


class Loopback(thinwire.Communicator):
    """Two ranks that are the same, and an all_reduce that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.gathers = 0

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def all_gather(self, block: object, blocks: object) -> None:
        self.gathers += 1
        np.from_dlpack(blocks)[:] = np.tile(np.from_dlpack(block), 2)

    def all_reduce(self, mine: object, sum: object) -> None:
        raise ValueError("no such luck")


class Garbled(Loopback):
    """Rank 1 of two; the reason that rank 0 sends is not UTF-8."""

    def rank(self) -> int:
        return 1

    def all_gather(self, block: object, blocks: object) -> None:
        super().all_gather(block, blocks)
        if self.gathers == 3:  # a header, how long the reasons are, the reasons
            np.from_dlpack(blocks)[:4] = [ord("x"), 0xFF, 0xC3, ord("(")]

    def abort(self, reason: str) -> None:
        self.reason = reason


def test_what_a_peer_says_need_not_be_text() -> None:
    communicator, told = Garbled(), []
    reducer = thinwire.Reducer(thinwire.top_k(0.1), [("w", 100)], communicator)
    reducer.begin_step()
    work = reducer.fail("none", told.append)
    with pytest.raises(thinwire.Error) as caught:
        work.wait()
    expected = "rank 0 failed in step 0, bucket 0: x\ufffd\ufffd("
    assert (str(caught.value), str(told[0]), communicator.reason) == (expected,) * 3
    reducer.close()


def test_a_communicator_in_python() -> None:
    o = thinwire.top_k(0.1)
    o.dense_below = 0
    communicator = Loopback()
    reducer = thinwire.Reducer(o, [("w", 100)], communicator)
    g = np.arange(100, dtype=np.float32)
    reducer.begin_step()
    reducer.reduce([("w", 100, True)], g).wait()
    assert g.tolist() == [0.0] * 90 + [float(i) for i in range(90, 100)]
    assert communicator.traffic.calls == communicator.gathers == reducer.stats().calls

    reducer = thinwire.Reducer(thinwire.dense(), [("w", 100)], Loopback())
    reducer.begin_step()
    with pytest.raises(
        thinwire.Error, match="the communicator's all_reduce failed: ValueError: no such luck"
    ) as caught:
        reducer.reduce([("w", 100, True)], g).wait()
    assert caught.value.code == "system"

    class Incomplete(Loopback):
        all_gather = thinwire.Communicator.all_gather

    reducer = thinwire.Reducer(o, [("w", 100)], Incomplete())
    reducer.begin_step()
    with pytest.raises(thinwire.Error, match=r"Incomplete.*does not implement all_gather"):
        reducer.reduce([("w", 100, True)], g).wait()


def test_select() -> None:
    indices, values = thinwire.select(TopK(0.2), np.array([1, -5, 3, 0, -4, 2, 0, 0, 1, 1], dtype=np.float32))
    assert np.from_dlpack(indices).tolist() == [1, 4]
    assert np.from_dlpack(values).tolist() == [-5, -4]


@pytest.mark.parametrize(
    "selector", [TopK(0.2), TrimmedTopK(0.2), HashedSlots(0.2), ThresholdSearch(0.2), SampledTopK(0.2)], ids=repr
)
def test_select_one_side(selector: object) -> None:
    given = np.array([1, -5, 3, 0, -4, 2, 0, 0, 1, 1], dtype=np.float32)
    for side, sign in (("largest", 1), ("smallest", -1)):
        indices, values = (np.from_dlpack(part) for part in thinwire.select(selector, given, side=side))
        assert len(values) > 0
        assert (values * sign > 0).all()
        assert (given[indices] == values).all()
    with pytest.raises(thinwire.Error, match="side is 'top', expected 'both' or 'largest' or 'smallest'"):
        thinwire.select(selector, given, side="top")


def test_works_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "import thinwire; print(thinwire.top_k().unit, thinwire.__version__)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["bucket", thinwire.__version__]


def test_the_binary_does_not_know_torch() -> None:
    extension = Path(thinwire._thinwire.__file__)
    listing = subprocess.run(["ldd", extension], capture_output=True, text=True, check=True).stdout
    libraries = {line.split()[0] for line in listing.splitlines()}  # names only: addresses are hexadecimal
    assert any(name.startswith("libc.so") for name in libraries)
    assert not [name for name in libraries if "torch" in name or "c10" in name]


def test_types_are_installed() -> None:
    folder = Path(thinwire.__file__).parent
    assert (folder / "py.typed").exists()
    stub = (folder / "_thinwire.pyi").read_text()
    for name in ("class Reducer", "class Communicator", "def redsync", "Literal['a', 'b']"):
        assert name in stub
