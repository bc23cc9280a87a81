"""A shell completes what the command would accept: words, options, their fixed values, and paths.

The scripts are made from the tables of options, and fixed values from the types of the options.
shtab and argcomplete read one argparse parser, and that of a recipe's command line has no place for
the words of other commands: the first word is one of them, or a file.

It does not promise to complete values that follow a `=` in zsh.
"""

import signal
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal, get_args, get_origin, get_type_hints

from elastic.config.care_options import CLEAN, COMPLETION, EXPORT, RUNS, SHELLS, SUFFIXES
from elastic.config.options import CHECK, COMMANDS, DRAWING, FLAGS, SERVE, WATCH, Options
from elastic.system import stop_signals

_NONE = "none"  # of --drain-signals


def _fixed_values(kind: Any) -> Iterator[str]:
    """The words that the type of a field of Options has, with what reads its text beside it."""
    if get_origin(kind) is Literal:
        yield from get_args(kind)
    elif kind is signal.Signals:
        yield from (each.name.removeprefix("SIG") for each in stop_signals.WARNINGS)
        yield _NONE
    elif isinstance(kind, partial):
        yield from (each for each in ("auto", "off") if each in kind.keywords.get("kinds", ()))
    else:
        for each in get_args(kind):
            yield from _fixed_values(each)


# By field of Options; other values of these options are numbers, or lists of these words.
VALUES = {
    name: found
    for name, kind in get_type_hints(Options, include_extras=True).items()
    if name in FLAGS and (found := tuple(_fixed_values(kind)))
}
# Of fields of Options whose values are paths.
RUN_PATHS = ("run_dir", "from_")
FOLDER_PATHS = ("rdzv_endpoint", "tensorboard")
FILE_PATHS = ("notice_file",)

# Options of the other commands, and of which kind their words are.
_OPTIONS: Mapping[str, tuple[str, ...]] = {
    CHECK: ("--steps", "--json"),
    **dict.fromkeys(COMMANDS, ("--json",)),
    **dict.fromkeys(DRAWING, ("--json", "--html")),
    WATCH: ("--once",),
    SERVE: ("--listen",),
    RUNS: ("--json",),
    CLEAN: ("--yes", "--json"),
    EXPORT: ("--entry", "--overwrite"),
    COMPLETION: (),
}
_TAKE_RUNS = (*COMMANDS, WATCH, SERVE, CLEAN)
_OF_ALL = ("--help", "--version")


def script(shell: str) -> str:
    """What the shell evaluates; shell: one of SHELLS."""
    template = _BASH if shell == "bash" else _ZSH
    fixed = "\n".join(f"    {FLAGS[name]}) values='{' '.join(found)}' ;;" for name, found in VALUES.items())
    own = "\n".join(f"    {command}) options='{' '.join(found)}' ;;" for command, found in _OPTIONS.items())
    replaced = {
        "@COMMANDS@": " ".join(_OPTIONS),
        "@FIXED@": fixed,
        "@OWN@": own,
        "@OPTIONS@": " ".join([*FLAGS.values(), *_OF_ALL]),
        "@RUN_PATHS@": "|".join(FLAGS[name] for name in RUN_PATHS),
        "@FOLDER_PATHS@": "|".join(FLAGS[name] for name in FOLDER_PATHS),
        "@FILE_PATHS@": "|".join([*(FLAGS[name] for name in FILE_PATHS), "--html"]),
        "@OTHERS@": "|".join([*_others(), "--steps", "--entry", "--listen"]),
        "@TAKE_RUNS@": "|".join(_TAKE_RUNS),
        "@SHELLS@": " ".join(SHELLS),
        "@SUFFIXES@": "|".join(suffix.removeprefix(".") for suffix in SUFFIXES),
    }
    for name, text in replaced.items():
        template = template.replace(name, text)
    return template


def _others() -> list[str]:
    """Options with values that no one but the user knows; `--fresh` has none."""
    known = {*VALUES, *RUN_PATHS, *FOLDER_PATHS, *FILE_PATHS, "fresh"}
    return [flag for name, flag in FLAGS.items() if name not in known]


# A run folder is offered at once where nothing is typed yet; else folders, one level at a time.
_BASH = r"""# eval "$(elastic-train completion bash)"
_elastic_train() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} values='' options='' i
  COMPREPLY=()
  # The shell takes the = of --option=value for a word of its own.
  [[ $word == = ]] && word=''
  [[ $before == = ]] && before=${COMP_WORDS[COMP_CWORD-2]}
  [[ ${COMP_WORDS[COMP_CWORD]} == = ]] && before=${COMP_WORDS[COMP_CWORD-1]}
  for ((i = 1; i < COMP_CWORD; i++)); do
    [[ ${COMP_WORDS[i]} == -- ]] && { _elastic_train_files; return; }
  done
  case $before in
@FIXED@
    @RUN_PATHS@) _elastic_train_runs; return ;;
    @FOLDER_PATHS@) _elastic_train_folders; return ;;
    @FILE_PATHS@) _elastic_train_files; return ;;
    @OTHERS@) return ;;
  esac
  if [[ -n $values ]]; then
    COMPREPLY=($(compgen -W "$values" -- "$word"))
    return
  fi
  options='@OPTIONS@'
  case ${COMP_WORDS[1]} in
@OWN@
  esac
  if [[ $word == -* ]]; then
    COMPREPLY=($(compgen -W "$options" -- "$word"))
    return
  fi
  if ((COMP_CWORD == 1)); then
    _elastic_train_files '!*.py'
    COMPREPLY+=($(compgen -W '@COMMANDS@' -- "$word"))
    return
  fi
  case ${COMP_WORDS[1]} in
    @TAKE_RUNS@) _elastic_train_runs ;;
    runs) _elastic_train_folders ;;
    export) if ((COMP_CWORD == 2)); then _elastic_train_runs; else _elastic_train_files '!*.@(@SUFFIXES@)'; fi ;;
    completion) COMPREPLY=($(compgen -W '@SHELLS@' -- "$word")) ;;
    *) _elastic_train_files '!*.py' ;;
  esac
}
_elastic_train_folders() {
  compopt -o filenames 2>/dev/null
  mapfile -t COMPREPLY < <(compgen -d -- "$word")
}
_elastic_train_files() {
  compopt -o filenames 2>/dev/null
  # A folder may be found by both.
  mapfile -t COMPREPLY < <(
    shopt -s extglob
    { compgen -d -- "$word"; compgen -f ${1:+-X "$1"} -- "$word"; } | sort -u
  )
}
_elastic_train_runs() {
  local run
  _elastic_train_folders
  [[ -z $word ]] || return
  for run in runs/*/; do
    [[ -e ${run}run.json ]] && COMPREPLY+=("${run%/}")
  done
}
complete -F _elastic_train elastic-train
"""

_ZSH = r"""#compdef elastic-train
# eval "$(elastic-train completion zsh)", after compinit
_elastic_train() {
  local before=${words[CURRENT-1]} values='' options='@OPTIONS@'
  if ((${words[(i)--]} < CURRENT)); then
    _files
    return
  fi
  case $before in
@FIXED@
    @RUN_PATHS@) _elastic_train_runs; return ;;
    @FOLDER_PATHS@) _files -/; return ;;
    @FILE_PATHS@) _files; return ;;
    @OTHERS@) return 1 ;;
  esac
  if [[ -n $values ]]; then
    compadd -- ${=values}
    return
  fi
  case ${words[2]} in
@OWN@
  esac
  if [[ $PREFIX == -* ]]; then
    compadd -- ${=options}
    return
  fi
  if ((CURRENT == 2)); then
    local found=1
    compadd -- @COMMANDS@ && found=0
    _files -g '*.py' && found=0
    return found
  fi
  case ${words[2]} in
    @TAKE_RUNS@) _elastic_train_runs ;;
    runs) _files -/ ;;
    export) if ((CURRENT == 3)); then _elastic_train_runs; else _files -g '*.(@SUFFIXES@)'; fi ;;
    completion) compadd -- @SHELLS@ ;;
    *) _files -g '*.py' ;;
  esac
}
_elastic_train_runs() {
  local found=1
  local -a there=(runs/*/run.json(N:h))
  [[ -z $PREFIX ]] && ((${#there})) && compadd -- $there && found=0
  _files -/ && found=0
  return found
}
compdef _elastic_train elastic-train
"""
