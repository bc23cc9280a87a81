"""What watches an agent reads the run's files while rank 0 is on its node, and only then.

Other agents would show the same a second time. One that was cut off may believe that it has rank 0,
and the files know better. With a run directory at a URL the files are those of this node, and they
have what this node saw.
"""

import os
from contextlib import ExitStack
from pathlib import Path

from elastic.agent.parts import AgentParts, Monitor
from elastic.config.options import Options
from elastic.errors import UsageError
from elastic.events import GenerationStarted
from elastic.observe.logged_event import last
from elastic.observe.reader import RunReader
from elastic.system.clock import SystemClock


class RankZeroReader:
    def __init__(self, parts: AgentParts, *, with_values: bool = False) -> None:
        """with_values: what the recipe logged comes with the new steps."""
        self.parts, self._with_values = parts, with_values
        self._reader: RunReader | None = None
        self._has_told = False

    def opened(self) -> RunReader | None:
        """It has read all events; None while rank 0 is elsewhere. Raises OSError."""
        settings = self.parts.settings
        if self.parts.group.is_first:
            if self._reader is None:
                self._reader = RunReader(settings.run, node=settings.node, with_values=self._with_values)
            start = last(self._reader.read_events(), GenerationStarted)
            if start is not None and start.node == settings.node:
                return self._reader
        self.close()
        return None

    def failed(self, problem: str, error: Exception) -> None:
        """Close the reader; the next call opens another. problem: what a user loses, said once."""
        self.close()
        if not self._has_told:
            self.parts.console.print_line(f"{problem} ({error}); training goes on, and it is tried again")
        self._has_told = True

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = None


def open_monitors(options: Options, opened: ExitStack) -> list[Monitor]:
    """They listen until `opened` ends, and write nothing before the run begins.

    Raises UsageError for what cannot work.
    """
    found: list[Monitor] = []
    if options.http is not None:
        from elastic.report.agent_pages import AgentPages

        http = AgentPages(options.http)
        found.append(http)
        opened.callback(http.stop)
        print(f"metrics of this agent: http://{http.address}/metrics", flush=True)
    if options.tensorboard is not None:
        if "://" in options.tensorboard or os.path.isfile(options.tensorboard):  # noqa: PTH113 - Path.is_file raises for a long name
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
        found.append(TensorBoard(Path(options.tensorboard).absolute(), SystemClock()))
        opened.callback(found[-1].stop)
    return found
