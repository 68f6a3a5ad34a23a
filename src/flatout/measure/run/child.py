"""Entry of the observed process: `python -m flatout.measure.run.child OPTIONS`.

The script will replace `__main__`; everything with a life of its own is in modules that keep their name.
"""

from __future__ import annotations

import json
import signal
import sys

from flatout.measure.run.lineage import end_with


def main() -> None:
    # Until there is something to save, an interrupt ends this process without a word.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    given = json.loads(sys.argv[1])
    end_with(given.get("parent"))  # before torch, which takes the longest
    from flatout.ground.codec import decode
    from flatout.measure.run.session import JobOptions, Session

    options = decode(JobOptions, given)
    sys.exit(Session(options).run())


if __name__ == "__main__":
    main()
