"""A step's statistics in words."""

from __future__ import annotations

from collections.abc import Sequence

from ._thinwire import StepStats


def describe(stats: StepStats, norms: Sequence[tuple[int, float]], scale: float) -> str:
    """The last step, a line for each question.

    Args:
        stats: of the step.
        norms: (step, norm of the residual over norm of the gradient) of some steps, ascending.
        scale: the loss scale; 1 without a scaler.
    """
    s = stats
    if s.jobs == 0:
        return f"step {s.step}: inactive, {s.reason}"
    kind = "sparse" if s.active else "dense"
    lines = [f"step {s.step}: {kind}, {s.reason}" + ("; UNDONE, a gradient was not finite" if s.non_finite else "")]
    saved = f", {s.dense_bytes / s.bytes_sent:.1f} times less than dense f32" if s.active and s.bytes_sent else ""
    lines.append(
        f"sent      {_bytes(s.bytes_sent)}{saved}, in {_count(s.calls, 'call')} for {_count(s.jobs, 'bucket')}"
    )
    if s.small_bytes_sent:
        lines[-1] += f"; {_bytes(s.small_bytes_sent)} of it tensors that are always dense"
    lines.append(f"density   {s.density:.3%} of the compressed parameters")
    if norms:
        earlier = f", {norms[0][1]:.1f} times at step {norms[0][0]}" if len(norms) > 1 else ""
        lines.append(f"residual  {norms[-1][1]:.1f} times the gradient's norm at step {norms[-1][0]}{earlier}")
    if s.clip_factor < 1 or s.clip_wait_seconds > 0:
        lines.append(f"clipping  the gradient times {s.clip_factor:.3g}; {_ms(s.clip_wait_seconds)} of overlap lost")
    if scale != 1:
        lines.append(f"scale     the loss times {scale:g}; residuals are in true units")
    lines.append(
        f"time      select {_ms(s.select_seconds)}, encode {_ms(s.encode_seconds)}, exchange "
        f"{_ms(s.exchange_seconds)}, decode {_ms(s.decode_seconds)}; the training loop waited "
        f"{_ms(s.exposed_wait_seconds)}"
    )
    return "\n".join(lines)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _bytes(count: int) -> str:
    for unit, size in (("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
