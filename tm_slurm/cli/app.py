"""`tm-slurm`: the commands by name, each imported only when it is used, so that --help stays quick."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import click

from tm_slurm import __version__


class LazyGroup(click.Group):
    """Commands that are imported on first use."""

    COMMANDS: ClassVar[dict[str, tuple[str, str]]] = {
        "cancel-move": ("tm_slurm.cli.cancel_move:cancel_move", "Take a `migrate` back, up to the switch."),
        "cluster": ("tm_slurm.cli.cluster:cluster", "A real Slurm cluster on this machine."),
        "completion": ("tm_slurm.cli.completion:completion", "Completion for bash, zsh or fish."),
        "doctor": ("tm_slurm.cli.doctor:doctor", "What this cluster lacks, and what mends it."),
        "events": ("tm_slurm.cli.events:events", "What has happened in a job; --follow for what comes."),
        "install": ("tm_slurm.cli.install:install", "For administrators: plugin, prolog, epilog, triggers."),
        "migrate": ("tm_slurm.cli.migrate:migrate", "Move a node's ranks to a standby."),
        "plan": ("tm_slurm.cli.plan:plan", "How many standbys? What failures cost with 0 to k of them."),
        "report": ("tm_slurm.cli.report:report", "A page and pictures: what happened, and what it cost."),
        "standbys": ("tm_slurm.cli.standbys:standbys", "The nodes that a job holds in reserve."),
        "status": ("tm_slurm.cli.status:status", "Ranks, nodes, standbys, step, last interruption of a job."),
        "submit": ("tm_slurm.cli.submit:submit", "Submit a training job."),
        "timeline": ("tm_slurm.cli.timeline:timeline", "Interruptions as spans, for Perfetto and others."),
        "watch": ("tm_slurm.cli.watch:watch", "A job as it runs: nodes, steps, loss, moves."),
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self.COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.COMMANDS:
            return None
        module, name = self.COMMANDS[cmd_name][0].split(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.COMMANDS and not args[0].startswith("-"):
            import difflib

            close = difflib.get_close_matches(args[0], list(self.COMMANDS), n=1)
            hint = f"did you mean {close[0]}?" if close else "`tm-slurm --help` lists them"
            raise click.UsageError(f"no command {args[0]!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _until_nobody_reads():  # --help is printed here
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _until_nobody_reads():
            return super().invoke(ctx)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            _write_nothing_more()
            where = f"{error.filename}: " if error.filename else "cannot write: "
            click.echo(f"Error: {where}{error.strerror or error}", err=True)
            sys.exit(4 if isinstance(error, PermissionError) else 1)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in sorted(self.COMMANDS.items())])


@contextlib.contextmanager
def _until_nobody_reads() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # whoever read our output has seen enough
        _write_nothing_more()
        sys.exit(128 + signal.SIGPIPE)


def _write_nothing_more() -> None:
    """Let what is still to be written to standard output go nowhere, instead of failing again at the end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tm-slurm")
def main() -> None:
    """PyTorch training on Slurm that moves off a drained node in about one step.

    \b
    tm-slurm submit configs/char_gpt.yaml
    tm-slurm status 1234

    A job is named by its id, its name or its directory; where only one is running, by nothing.

    \b
    Exit codes: 0 ok, 1 failed, 2 your mistake, 3 not found, 4 not permitted.
    """


if __name__ == "__main__":
    main()
