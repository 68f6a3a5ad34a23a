"""Entry point of the observed process; the script will replace it as `__main__`.

Everything that must outlive that lives in modules that keep their name.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Collection

from flatout.measure.run.lineage import end_with

MODULE = "flatout.measure.run.child"


def main(at_start: Collection[str]) -> None:
    # Until there is something to save, an interrupt ends this process silently.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    given = json.loads(sys.argv[1])
    end_with(given.get("parent"))  # first of all, because imports take long
    from flatout.ground.codec import decode
    from flatout.measure.run.session import JobOptions, Session

    options = decode(JobOptions, given)
    if options.progress_fd is not None:
        os.set_inheritable(options.progress_fd, False)
    sys.exit(Session(options, at_start=at_start).run())
