"""Which of the ways to watch an agent its command asks for; what cannot work is refused here."""

from contextlib import ExitStack
from pathlib import Path

from elastic.agent.parts import Monitor
from elastic.config.options import Options
from elastic.errors import UsageError
from elastic.system.clock import SystemClock

_CLOCK = SystemClock()


def open_monitors(options: Options, opened: ExitStack) -> list[Monitor]:
    """They listen until `opened` ends, and write nothing before the run begins.

    Raises UsageError.
    """
    found: list[Monitor] = []
    if options.http is not None:
        from elastic.report.agent_pages import AgentPages

        http = AgentPages(options.http, _CLOCK)
        opened.callback(http.stop)
        found.append(http)
        print(f"metrics of this agent: http://{http.address}/metrics", flush=True)
    if options.tensorboard is not None:
        try:
            is_other = "://" in options.tensorboard or Path(options.tensorboard).is_file()
        except OSError:  # a name that is too long
            is_other = True
        if is_other:
            raise UsageError(
                f"expected a folder, found --tensorboard {options.tensorboard}; event files are written to a file system alone"
            )
        try:
            from elastic.report.tensorboard import TensorBoard
        except Exception as error:  # protobuf of another version raises TypeError
            raise UsageError(
                f"expected the package tensorboardX for --tensorboard, found none that can be imported ({type(error).__name__}: {error});"
                " pip install --force-reinstall 'elastic-train[tensorboard]', or leave --tensorboard out"
            ) from error
        found.append(TensorBoard(Path(options.tensorboard).absolute(), _CLOCK))
        opened.callback(found[-1].stop)
    return found
