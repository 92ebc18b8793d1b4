"""How a command ends when it cannot do what was asked: one line on standard error, and an exit code.

0 ok, 1 failed, 2 the user's mistake, 3 not found, 4 not permitted.
"""

from __future__ import annotations

import click


class Failed(click.ClickException):
    """Something went wrong that is not the user's mistake."""

    exit_code = 1


class UserMistake(click.ClickException):
    """What was asked makes no sense; the message says what would."""

    exit_code = 2


class NotFound(click.ClickException):
    exit_code = 3


class NotPermitted(click.ClickException):
    exit_code = 4
