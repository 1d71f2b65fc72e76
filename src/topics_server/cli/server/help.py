"""`topics help VERB`: prints what `topics VERB --help` prints."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem


def _verbs(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the first word with the verbs."""
    root = ctx.find_root().command
    if ctx.params.get("words") or not isinstance(root, click.Group):
        return []
    return [CompletionItem(v) for v in root.list_commands(ctx) if v.startswith(incomplete)]


@click.command("help")
@click.argument("words", metavar="[VERB]...", nargs=-1, shell_complete=_verbs)
@click.pass_context
def command(ctx: click.Context, words: tuple[str, ...]) -> None:
    """Print the help of VERB; without VERB, list all verbs.

    For a verb that has verbs of its own, name both: topics help queue redrive
    """
    root = ctx.find_root()
    # Parse these words as a command line, so that both spellings print the same.
    with root.command.make_context(root.info_name, [*words, "--help"]) as asked:
        root.command.invoke(asked)
