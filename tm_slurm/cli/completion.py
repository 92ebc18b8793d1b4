"""`tm-slurm completion`: what makes a shell complete commands, options and job ids."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

VARIABLE = "_TM_SLURM_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes SHELL complete commands, options and job ids.

    \b
    eval "$(tm-slurm completion bash)"   # in ~/.bashrc
    tm-slurm completion fish > ~/.config/fish/completions/tm-slurm.fish
    """
    found = get_completion_class(shell)
    assert found is not None, shell
    root = click.get_current_context().find_root().command
    click.echo(found(root, {}, "tm-slurm", VARIABLE).source())
