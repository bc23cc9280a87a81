"""A shell completes commands, options and the words of an option that has few; else names of files.

One script serves both shells: zsh has functions of its own that run bash's completions. argparse's
readers, shtab among them, read one parser: the first word here is a command or a file.
"""

from collections.abc import Mapping

from elastic.config.care_options import CLEAN, COMPLETION, EXPORT, RUNS, SHELLS
from elastic.config.options import CHECK, COMMANDS, DRAWING, FLAGS, SERVE, WATCH

OPTIONS: Mapping[str, str] = {
    CHECK: "--steps --json",
    **dict.fromkeys(COMMANDS, "--json"),
    **dict.fromkeys(DRAWING, "--json --html"),
    WATCH: "--once",
    SERVE: "--listen",
    RUNS: "--json",
    CLEAN: "--yes --json",
    EXPORT: "--entry --overwrite",
    COMPLETION: "",
}
# By field of Options.
VALUES: Mapping[str, str] = {
    "rdzv_backend": "dir c10d etcd",
    "balance": "auto off",
    "notice": "aws gcp azure",
    "save_every": "auto",
    **dict.fromkeys(("snapshot_every", "audit", "hang_timeout"), "auto off"),
}


def script(shell: str) -> str:
    """The text that the shell evaluates; shell: one of SHELLS."""
    values = {FLAGS[name]: words for name, words in VALUES.items()} | {COMPLETION: " ".join(SHELLS)}
    replaced = {
        "@VALUES@": _cases(values),
        "@OPTIONS@": _cases(OPTIONS),
        "@ALL@": " ".join([*FLAGS.values(), "--help", "--version"]),
        "@COMMANDS@": " ".join(OPTIONS),
    }
    text = ("autoload -Uz bashcompinit && bashcompinit\n" if shell == "zsh" else "") + _SCRIPT
    for name, words in replaced.items():
        text = text.replace(name, words)
    return text


def _cases(words: Mapping[str, str]) -> str:
    return "\n".join(f"    {key}) words='{found}' ;;" for key, found in words.items())


# -o default: where no word fits, names of files.
_SCRIPT = r"""_elastic_train() {
  local word=${COMP_WORDS[COMP_CWORD]} words=''
  case ${COMP_WORDS[COMP_CWORD-1]} in
@VALUES@
  esac
  ((COMP_CWORD == 1)) && words='@COMMANDS@'
  if [[ $word == -* ]]; then
    words='@ALL@'
    case ${COMP_WORDS[1]} in
@OPTIONS@
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _elastic_train elastic-train
"""
