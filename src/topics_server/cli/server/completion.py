"""`topics completion`: prints the completion script of a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

PROGRAM = "topics"
VARIABLE = "_TOPICS_COMPLETE"


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    r"""Print a script that makes SHELL complete verbs and options of `topics`.

    \b
    bash, in ~/.bashrc:   eval "$(topics completion bash)"
    zsh, in ~/.zshrc:     eval "$(topics completion zsh)"
    fish:                 topics completion fish > ~/.config/fish/completions/topics.fish

    bash must be 4.4 or newer; the one of macOS is older.
    """
    kind = get_completion_class(shell)
    assert kind is not None, "click knows each of them"
    root = ctx.find_root().command
    # Not `source()`: for bash it starts a bash to ask its version, which need not be the one here.
    made = kind(root, {}, PROGRAM, VARIABLE)
    click.echo(made.source_template % made.source_vars())
