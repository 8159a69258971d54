"""Texts to token ids, in this process or in others.

This file is also the program of a worker process: it then imports nothing of the package, so that a worker starts in a
tenth of a second and holds little but the tokenizer. A worker reads pickled tasks from standard input, writes pickled
results to standard output, and ends when its input does: with the process that started it, however that ends.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import queue
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

# Of a token in a text: its id, its first character and the one after its last.
Token = tuple[int, int, int]


class WorkerError(RuntimeError):
    """A worker process ended, or the tokenizer failed. One line."""


class Task(NamedTuple):
    """Texts to encode. overlap: None for whole documents, which get the end token; else the characters that the one
    text, a window of a long document, shares with each of its neighbours."""

    texts: list[str]
    overlap: int | None = None


class Encoded(NamedTuple):
    """Ids of all texts of a task, dtype[n], and how many each text has, int64[texts].

    head, tail: of a window, the tokens that lie in its first `overlap` characters and those that begin in its last
    ones. Places in the tail count from the first of these characters.
    """

    ids: np.ndarray
    lengths: np.ndarray
    head: list[Token]
    tail: list[Token]


class Encoder:
    """Encodes with a tokenizer.json (its bytes), set to neither cut nor fill up. No special tokens are added.

    control_tokens: names of special tokens in a text become these tokens, as in transformers; else they are text.
    """

    def __init__(self, tokenizer: bytes, *, end: int, dtype: str, control_tokens: bool):
        from tokenizers import Tokenizer

        # One core a worker: the library would start a thread on each core of the machine.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self.library = Tokenizer.from_str(tokenizer.decode())
        self.library.no_truncation()
        self.library.no_padding()
        self.library.encode_special_tokens = not control_tokens
        self.end, self.dtype = end, np.dtype(dtype).newbyteorder("<")

    def __call__(self, task: Task) -> Encoded:
        if task.overlap is None:
            parts = self.library.encode_batch_fast(task.texts, add_special_tokens=False)
            lists = [[*part.ids, self.end] for part in parts]
            lengths = np.fromiter(map(len, lists), np.int64, len(lists))
            ids = np.fromiter(itertools.chain.from_iterable(lists), self.dtype, int(lengths.sum()))
            return Encoded(ids, lengths, [], [])
        (text,) = task.texts
        (part,) = self.library.encode_batch([text], add_special_tokens=False)
        ids = np.array(part.ids, self.dtype)
        head, tail, start = [], [], len(text) - task.overlap
        for i, token in enumerate(ids.tolist()):
            first, last = part.token_to_chars(i) or (0, 0)
            if last > task.overlap:
                break
            head.append((token, first, last))
        for i in range(len(ids) - 1, -1, -1):
            first, last = part.token_to_chars(i) or (0, 0)
            if first < start:
                break
            tail.append((int(ids[i]), first - start, last - start))
        return Encoded(ids, np.array([len(ids)]), head, tail[::-1])


class Pool:
    """Encodes tasks in `workers` processes, one task a process at a time; with one worker in a thread of this process.

    `options` are those of `Encoder`. Futures raise WorkerError.
    """

    def __init__(self, workers: int, options: dict[str, Any]):
        self._threads = ThreadPoolExecutor(workers)
        self._encoder = Encoder(**options) if workers == 1 else None
        self._processes: list[subprocess.Popen] = []
        self._free: queue.SimpleQueue[subprocess.Popen] = queue.SimpleQueue()
        for _ in range(workers if workers > 1 else 0):
            # -P: this file's folder is no place to import from.
            command = [sys.executable, "-P", __file__]
            # A group of its own: Ctrl-C is for the program, which ends its workers.
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
            self._processes.append(process)
        for process in self._processes:
            self._threads.submit(self._start, process, options)

    def _start(self, process: subprocess.Popen, options: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it has ended: the first task says so
            pickle.dump(options, process.stdin)
        self._free.put(process)

    def submit(self, task: Task) -> Future[Encoded]:
        return self._threads.submit(self._encode, task)

    def _encode(self, task: Task) -> Encoded:
        if self._encoder is not None:
            try:
                return self._encoder(task)
            except BaseException as error:  # a panic of the library is no Exception
                raise WorkerError(_one_line(error)) from None
        process = self._free.get()
        try:
            pickle.dump(tuple(task), process.stdin)  # as the class, a worker would import the package
            process.stdin.flush()
            result = pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            code = process.wait()
            how = f"by signal {-code}" if code < 0 else f"with status {code}"
            raise WorkerError(f"a worker process ended {how}; where memory is short use fewer") from None
        finally:
            self._free.put(process)
        if isinstance(result, str):
            raise WorkerError(result)
        return Encoded(*result)

    def close(self) -> None:
        """Ends the workers; a task that has begun is left unfinished."""
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            with contextlib.suppress(OSError):  # what is left in its buffer has no reader
                process.stdin.close()
            process.stdout.close()
            process.wait()


def _one_line(error: BaseException) -> str:
    return f"the tokenizer failed: {' '.join(str(error).split())[:300] or type(error).__name__}"


def serve() -> None:
    """Works on the tasks that come in, until there are no more."""
    tasks, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints does not print between results
    try:
        encoder = Encoder(**pickle.load(tasks))
        while True:
            task = Task(*pickle.load(tasks))
            try:
                result: Encoded | str = encoder(task)
            except BaseException as error:
                result = _one_line(error)
            pickle.dump(result if isinstance(result, str) else tuple(result), results)
            results.flush()
    except (EOFError, BrokenPipeError):
        pass


if __name__ == "__main__":
    serve()
