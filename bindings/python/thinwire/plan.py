"""A cost model in closed form: what an exchange would take, dense or sparse, in seconds and bytes.

    from thinwire import plan

    link = dict(latency_seconds=50e-6, seconds_per_byte=8e-9)  # 1 Gbit/s
    plan.dense_seconds(8, 4 * numel, **link)
    plan.sparse_seconds(8, 4 * numel, density=0.001, select_seconds=0.02, decode_seconds=0.0005, **link)

The formulas, after RedSync's, stand in ``docs/theory.md``. Errors: thinwire.Error (invalid_argument) that names the
argument.
"""

from ._thinwire import break_even_ranks, dense_seconds, sparse_seconds, traffic_ratio, worth_compressing

__all__ = ["break_even_ranks", "dense_seconds", "sparse_seconds", "traffic_ratio", "worth_compressing"]
