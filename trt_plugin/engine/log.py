"""TensorRT's log, kept for errors and warnings, and its progress as bars."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trt_plugin.output import progress_bars
from trt_plugin.plugin import PLUGINS


class Log:
    """Keeps TensorRT's errors and the plugin's warnings.

    The logger raises nothing: an exception could not pass through TensorRT.
    """

    def __init__(self, trt: Any) -> None:
        lines: list[str] = []
        warnings_of_plugin: list[str] = []
        levels = trt.ILogger.Severity

        class Logger(trt.ILogger):  # type: ignore[misc]
            def log(self, severity: Any, message: str) -> None:
                if severity in (levels.ERROR, levels.INTERNAL_ERROR):
                    lines.append(message)
                elif severity == levels.WARNING and message.startswith(PLUGINS):
                    warnings_of_plugin.append(message)

        self.logger = Logger()
        self.warnings_of_plugin = warnings_of_plugin
        self._lines = lines

    def errors_of_plugin(self) -> list[str]:
        """Returns the plugin's errors since the last call of :meth:`text`."""
        return [line for line in self._lines if line.startswith(PLUGINS)]

    def text(self) -> str:
        """Returns the errors since the last call, each once."""
        text = "; ".join(dict.fromkeys(self._lines)) or "its log says no more"
        self._lines.clear()
        return text


@contextmanager
def progress_monitor(trt: Any, shown: bool) -> Iterator[Any]:
    """Yields TensorRT's progress monitor, one bar for each phase."""
    with progress_bars(shown=shown) as bars:
        tasks: dict[str, Any] = {}

        class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
            def phase_start(
                self, phase_name: str, parent_phase: str | None, num_steps: int
            ) -> None:
                tasks[phase_name] = bars.add_task(phase_name, total=num_steps)

            def step_complete(self, phase_name: str, step: int) -> bool:
                bars.update(tasks[phase_name], completed=step + 1)
                return True

            def phase_finish(self, phase_name: str) -> None:
                bars.remove_task(tasks.pop(phase_name))

        yield Monitor()
