"""The one exception that thinwire raises."""

from __future__ import annotations

import enum


class ErrorCode(str, enum.Enum):
    """What kind of thing went wrong. Compares equal to its name: ``error.code == "timeout"``."""

    invalid_argument = "invalid_argument"  # the caller's fault; nothing was changed
    unsupported = "unsupported"  # a valid wish that this version does not fulfil
    timeout = "timeout"  # a wait for other ranks ran out
    remote = "remote"  # another rank failed or differs from this one
    corrupt_payload = "corrupt_payload"  # received bytes were refused; `position` says where
    system = "system"  # transport or operating system


class Error(RuntimeError):
    """Everything that can go wrong in thinwire; its text is one sentence that names the offending thing.

    Attributes:
        code: what kind of thing went wrong.
        position: byte offset of the first offending byte of a payload; only with ``corrupt_payload``.
    """

    def __init__(self, code: ErrorCode | str, sentence: str, position: int | None = None) -> None:
        super().__init__(sentence)
        self.code = ErrorCode(code)
        self.position = position

    def __reduce__(self) -> tuple[type[Error], tuple[str, str, int | None]]:
        return type(self), (self.code.value, str(self), self.position)
