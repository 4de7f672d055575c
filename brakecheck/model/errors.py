"""The one error type that reaches a user: what is wrong, where, and what to do about it."""

from __future__ import annotations

from typing import Optional


class BrakecheckError(Exception):
    """Something the user can act on.

    what:  what is wrong, one sentence.
    where: file, byte offset, field or option that it was found in.
    todo:  what to do about it.
    exit_code: process exit status; verdicts own 0-3, so errors start at 64 (sysexits.h).
    """

    exit_code = 65

    def __init__(self, what: str, where: Optional[str] = None, todo: Optional[str] = None) -> None:
        super().__init__(what)
        self.what, self.where, self.todo = what, where, todo

    def __str__(self) -> str:
        text = self.what
        if self.where:
            text += f"\n  where: {self.where}"
        if self.todo:
            text += f"\n  to do: {self.todo}"
        return text


class UsageError(BrakecheckError):
    """A command line, stack spec or policy that cannot be understood."""

    exit_code = 64


class UnavailableError(BrakecheckError):
    """Something needed cannot be had: no network, no such release, no device, no disk space."""

    exit_code = 69
