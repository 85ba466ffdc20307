"""The cost model: worked out by hand in tests/plan_test.cc; here that arguments and errors cross unharmed."""

import math

import pytest

import thinwire
from thinwire import plan

LINK = {"latency_seconds": 50e-6, "seconds_per_byte": 8e-9}


def test_seconds() -> None:
    sparse = plan.sparse_seconds(8, 100e6, density=0.001, select_seconds=0.025, decode_seconds=0.0005, **LINK)
    assert sparse == pytest.approx(0.04035, rel=1e-12)
    assert plan.sparse_seconds(3, 8e6, density=0.01, bytes_per_entry=4, seconds_per_byte=1) == pytest.approx(160e3)
    dense = plan.dense_seconds(8, 100e6, reduce_seconds_per_byte=0.25e-9, **LINK)
    assert dense == pytest.approx(1.422175, rel=1e-12)
    assert plan.worth_compressing(0.2, 0.7, 1.0) is True
    assert plan.worth_compressing(0.25, 0.75, 1.0) is False


def test_traffic() -> None:
    assert plan.traffic_ratio(128, 0.001) == pytest.approx(0.128)
    assert plan.traffic_ratio(128, 0.001, bytes_per_entry=4) == pytest.approx(0.064)
    assert plan.break_even_ranks(0.001) == pytest.approx(1000)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: plan.sparse_seconds(0, 1, seconds_per_byte=1), "ranks"),
        (lambda: plan.sparse_seconds(2, -1, seconds_per_byte=1), "dense_bytes"),
        (lambda: plan.sparse_seconds(2, 1, density=2, seconds_per_byte=1), "density"),
        (lambda: plan.dense_seconds(2, 1, seconds_per_byte=math.nan), "seconds_per_byte"),
        (lambda: plan.break_even_ranks(0.0), "density"),
        (lambda: plan.worth_compressing(-1, 1, 1), "compress_seconds"),
    ],
)
def test_errors_name_the_argument(call, name) -> None:
    with pytest.raises(thinwire.Error, match=name) as caught:
        call()
    assert caught.value.code == thinwire.ErrorCode.invalid_argument
