"""``mopd completion``: a script that completes commands and options in a shell. It holds all words itself, so no press
of Tab waits for Python."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

ABOUT = "print a script that completes commands in bash or zsh"
EXAMPLES = """\
examples:
  mopd completion bash             the script; in ~/.bashrc: source <(mopd completion bash)
  mopd completion zsh              the same for zsh; in ~/.zshrc, behind compinit
"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
SCRIPT = """\
_mopd() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} given=$((COMP_CWORD - 1)) names options
  ((given > 2)) && given=2
  case "${{COMP_WORDS[*]:1:$given}} " in
{cases}
  esac
  [[ $word == -* ]] && names=$options
  COMPREPLY=($(compgen -W "$names" -- "$word"))
}}
complete -o default -F _mopd mopd
"""
"""Where no name fits, as behind ``mopd train``, the shell completes file names."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Light to import, as all of this file."""
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell that reads the script")


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Print the script; the exit code."""
    script = SCRIPT.format(cases="\n".join(_cases(args.parser)))
    print((ZSH if args.shell == "zsh" else "") + script, end="")
    return 0


def parts_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of a command's own subcommands by name; empty where it has none."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _cases(parser: argparse.ArgumentParser, path: str = "") -> Iterator[str]:
    """Yield a line of the script for each command, behind those of its parts: the shell takes the first that fits."""
    parts = parts_of(parser)
    for name, nested in parts.items():
        yield from _cases(nested, f"{path}{name} ")
    options = [option for action in parser._actions if action.help != argparse.SUPPRESS
               for option in action.option_strings if option.startswith("--") and "=" not in option]  # fmt: skip
    yield f'    "{path}"*) names="{" ".join(parts)}" options="{" ".join(options)}" ;;'
