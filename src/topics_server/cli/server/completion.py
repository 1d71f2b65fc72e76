"""`topics completion`: prints the completion script of a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

PROGRAM = "topics"
VARIABLE = "_TOPICS_COMPLETE"
# The script of zsh ends with `compdef`, which exists only after `compinit`. The ~/.zshrc of a new
# account does not call `compinit`.
ZSH_START = "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }\n"


HELP = """Print a script that makes SHELL complete verbs and options of `topics`.

\b
bash, in ~/.bashrc:   eval "$(topics completion bash)"
zsh, in ~/.zshrc:     eval "$(topics completion zsh)"
fish:                 topics completion fish > ~/.config/fish/completions/topics.fish

bash must be 4.4 or newer; the bash of macOS is older.
"""


@click.command("completion", help=HELP)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """See `HELP`."""
    kind = get_completion_class(shell)
    assert kind is not None, "click knows each of them"
    root = ctx.find_root().command
    # Do not use `source()`: for bash it starts a bash to get the version, which may differ from
    # that of the user's shell.
    made = kind(root, {}, PROGRAM, VARIABLE)
    start = ZSH_START if shell == "zsh" else ""
    click.echo(start + made.source_template % made.source_vars())
