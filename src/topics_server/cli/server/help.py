"""`topics help VERB`: prints what `topics VERB --help` prints."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem


def _verbs(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a word with the verbs of the command that the preceding words name."""
    command: click.Command | None = ctx.find_root().command
    for word in ctx.params.get("words") or ():
        command = command.get_command(ctx, word) if isinstance(command, click.Group) else None
    if not isinstance(command, click.Group):
        return []
    return [CompletionItem(v) for v in command.list_commands(ctx) if v.startswith(incomplete)]


@click.command("help")
@click.argument("words", metavar="[VERB]...", nargs=-1, shell_complete=_verbs)
@click.pass_context
def command(ctx: click.Context, words: tuple[str, ...]) -> None:
    """Print the help of VERB; without VERB, list all verbs.

    For a verb that has verbs of its own, name both: topics help queue redrive
    """
    root = ctx.find_root()
    # Parse these words as a command line, so that `help VERB` and `VERB --help` print the same.
    with root.command.make_context(root.info_name, [*words, "--help"]) as asked:
        root.command.invoke(asked)
