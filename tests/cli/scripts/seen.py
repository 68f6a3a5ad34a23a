"""Write down what a script can see of its process; end the way the first argument says."""

import atexit
import gc
import inspect
import json
import linecache
import locale
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import types
import warnings
from pathlib import Path

number: int = 3


class Point:
    """Pickled as `__main__.Point`."""


def double(x):
    return 2 * x


def spawned():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.map(double, [1, 2])


def seen():
    main = sys.modules["__main__"]
    return {
        "sys.path": sys.path,
        "sys.argv": sys.argv,
        "sys.orig_argv": sys.orig_argv[sys.orig_argv.index(sys.argv[1]) :],
        "sys.flags": str(sys.flags),
        "sys.executable": sys.executable,
        "sys.excepthook": sys.excepthook is sys.__excepthook__,
        "sys.getrecursionlimit": sys.getrecursionlimit(),
        "sys.gettrace": repr((sys.gettrace(), sys.getprofile())),
        "sys.getswitchinterval": sys.getswitchinterval(),
        "sys.stdin": [sys.stdin.isatty(), sys.stdin.encoding, sys.stdin.readline()],
        "sys.stdout": [sys.stdout.isatty(), sys.stdout.line_buffering, sys.stdout.encoding],
        "sys.stderr": [sys.stderr.isatty(), sys.stderr.line_buffering, sys.stderr.encoding],
        "torch is imported": "torch" in sys.modules,
        "__name__": __name__,
        "__file__": __file__,
        "__doc__": __doc__,
        "__package__": __package__,
        "__spec__": getattr(__spec__, "name", None),
        "__loader__": [type(__loader__).__name__, __loader__.name],
        "__builtins__": type(__builtins__).__name__,
        "__annotations__": repr(__annotations__),
        "__main__": [repr(main), vars(main) is globals()],
        "names of __main__": sorted(vars(main)),
        "multiprocessing": [sys.modules["__mp_main__"] is main, spawned()],
        "pickle": type(pickle.loads(pickle.dumps(Point()))) is Point,  # noqa: S301 - its own
        "inspect": [
            inspect.getsource(double),
            inspect.getsourcefile(Point),
            inspect.getmodule(double) is main,
        ],
        "linecache": linecache.getline(double.__code__.co_filename, 1),
        "beside it": sorted(path.name for path in Path(__file__).parent.iterdir()),
        "os.getcwd": os.getcwd(),
        "os.environ": dict(os.environ),
        "os.umask": os.umask(0o22),
        "an open file": os.read(97, 9).decode(),
        "process group": os.getpgrp() == os.getpid(),
        "signals": {
            int(each): repr(signal.getsignal(each))
            for each in signal.valid_signals()
            if signal.getsignal(each) is not signal.SIG_DFL
        },
        "signal mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "locale": [locale.setlocale(locale.LC_ALL), locale.getpreferredencoding()],
        "warnings": [repr(each) for each in warnings.filters],
        "threads": [each.name for each in threading.enumerate()],
        "gc": [gc.get_threshold(), gc.isenabled(), gc.get_freeze_count()],
    }


def warn_twice():
    for _ in range(2):
        warnings.warn("this goes away", DeprecationWarning, stacklevel=1)
        warnings.warn("look at the caller", stacklevel=2)


def fail():
    try:
        json.loads("{")
    except ValueError as error:
        raise RuntimeError("no figures") from error


def train(optimizer, steps):
    """A loop of which a diagnosis compiles the statements in its own way."""
    for step in range(steps):
        print(step, str(step))
        optimizer.step(fail() if step == 1 else None)


def on_signal(number, _frame):
    print(signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        sys.exit(0)


def main():
    how, *out = sys.argv[1:]
    if out:
        Path(out[0]).write_text(json.dumps(seen()))
    if how == "return":
        warn_twice()
        for word in ("first", "last"):
            atexit.register(print, f"registered {word}")
        threading.Thread(target=lambda: print(gc.collect() * 0, "a thread ends")).start()
    elif how == "exit":
        sys.exit("no data here")
    elif how == "raise":
        sys.excepthook = lambda *error: (print("my hook:", file=sys.stderr), sys.__excepthook__(*error))
        train(types.SimpleNamespace(step=print), 3)
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "wait":
        for each in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(each, on_signal)
        print("ready", flush=True)
        while True:
            signal.pause()


if __name__ == "__main__":
    main()
