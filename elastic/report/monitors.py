"""Which of the ways to watch an agent its command asks for; what cannot work is refused here."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

from elastic.agent.parts import AgentParts, Monitor
from elastic.config.options import Options
from elastic.errors import UsageError
from elastic.system.clock import SystemClock

_CLOCK = SystemClock()


def check_monitoring(options: Options) -> None:
    """Raises UsageError; starts nothing and writes nothing."""
    if options.http is not None:
        from elastic.report.http_server import listen

        listen(options.http).close()
    if options.tensorboard is not None:
        try:
            is_other = "://" in options.tensorboard or Path(options.tensorboard).is_file()
        except OSError:  # a name that is too long
            is_other = True
        if is_other:
            raise UsageError(
                f"expected a folder, found --tensorboard {options.tensorboard}; event files are written to a file system alone"
            )


class Monitors:
    """Any number of them, none included. One that fails costs its own service, and no training."""

    def __init__(self, *monitors: Monitor) -> None:
        self._monitors = monitors

    def start(self, parts: AgentParts) -> None:
        for each in self._monitors:
            try:
                each.start(parts)
            except Exception as error:  # no thread is left, for instance
                parts.console.print_line(
                    f"this agent is not watched by {type(each).__name__} ({error}); training goes on"
                )

    def stop(self) -> None:
        for each in self._monitors:
            with suppress(Exception):  # the run is over, and its exit code must not change
                each.stop()


@contextmanager
def open_monitors(options: Options) -> Iterator[Monitor]:
    """They listen from now on. Raises UsageError."""
    opened: list[Monitor] = []
    try:
        if options.http is not None:
            from elastic.report.agent_pages import AgentPages

            http = AgentPages(options.http, _CLOCK)
            opened.append(http)
            print(f"metrics of this agent: http://{http.address}/metrics", flush=True)
        if options.tensorboard is not None:
            _import_tensorboardx()
            from elastic.report.tensorboard import TensorBoard

            opened.append(TensorBoard(Path(options.tensorboard).absolute(), _CLOCK))
        yield Monitors(*opened)
    finally:
        for each in opened:
            each.stop()


def _import_tensorboardx() -> None:
    """Not in `check_monitoring`: the fork server, which begins after that, has no such imports.

    Raises UsageError.
    """
    try:
        import_module("elastic.report.tensorboard")
    except Exception as error:  # protobuf of another version raises TypeError
        raise UsageError(
            f"expected the package tensorboardX for --tensorboard, found none that can be imported ({type(error).__name__}: {error});"
            " pip install --force-reinstall 'elastic-train[tensorboard]', or leave --tensorboard out"
        ) from error
