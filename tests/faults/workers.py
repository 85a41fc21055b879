"""Cases run in a process of their own: one that hangs or dies is an outcome, too."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, Queue

from tests.faults.outcomes import Case, Outcome

_LIMIT = 60.0  # seconds without an outcome, then it hangs


def serve(try_out: Callable[[Case], Outcome]) -> None:
    """Read cases, write outcomes, one on a line."""
    output, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        outcome = try_out(Case(**json.loads(line)))
        print(json.dumps({"kind": outcome.kind, "words": outcome.words}), file=output, flush=True)


def run_cases(module: str, cases: Sequence[Case]) -> Iterator[Outcome]:
    """Run cases in a process of their own, which is started anew where one hangs or dies."""
    left = list(cases)
    while left:
        with _Child(module, left) as child:
            while left:
                outcome = child.next()
                yield outcome
                left.pop(0)
                if child.gone:
                    break


class _Child:
    """A process that runs cases."""

    def __init__(self, module: str, cases: Sequence[Case]) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", module, "--serve"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        self._lines: Queue[str | None] = Queue()
        self._said: list[str] = []
        targets = (self._write, self._read, self._listen)
        self._threads = [threading.Thread(target=each, args=(list(cases),), daemon=True) for each in targets]
        for thread in self._threads:
            thread.start()
        self.gone = False

    def __enter__(self) -> "_Child":  # noqa: PYI034 - Python 3.10 has no Self
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for thread in self._threads:
            thread.join()

    def _write(self, cases: list[Case]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as file:
            file.write("".join(json.dumps(case.to_json()) + "\n" for case in cases))

    def _read(self, _cases: list[Case]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout:
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(None)

    def _listen(self, _cases: list[Case]) -> None:
        assert self._process.stderr is not None
        with self._process.stderr:
            for line in self._process.stderr:
                self._said = [*self._said[-20:], line]

    def next(self) -> Outcome:
        """Wait for the next outcome."""
        try:
            line = self._lines.get(timeout=_LIMIT)
        except Empty:
            self.gone = True
            return Outcome("hang", f"no word for {_LIMIT:.0f} s")
        if line is None:
            self.gone = True
            time.sleep(0.2)
            return Outcome("lost", f"the process died: {' '.join(''.join(self._said).split())[-300:]}")
        return Outcome(**json.loads(line))
