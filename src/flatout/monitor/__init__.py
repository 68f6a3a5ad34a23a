"""The monitor: what a run does, live and afterwards.

    sample.py      the Sample: everything else makes one or takes one; merging.py makes one of many
    machine.py, gpus.py (gpm.py, pcie.py), processes.py, attached.py    meters, read again and again
    sampler.py     one thread that asks the meters and gives every Sample to its listeners

    job.py         `flatout.watch`: a job reports itself; unmodified.py does it for a script that does not
    reporter.py, device_side.py    what the job's side costs and sees;  channel.py  how it reaches a monitor

    verdict.py     what bounds the run (urgent.py, trend.py, window.py);  line.py  the live line
    runs.py        the folder of a run;  history.py  its log;  sinks/  other tools' formats

    watching.py    what `flatout watch` puts together;  launched.py  becomes a script under watch
    following.py   samples as they come: as lines, or fullscreen.py (keys.py, view.py, playback.py)
    screen.py      the terminal view as one picture (panels.py, sparkline.py);  web/  the page

    recorded.py    a whole run in some hundred points;  summary.py  its figures;  compare.py  of two runs
    report.py      one HTML page (curves.py);  plots.py  one picture

Nothing here imports torch: a job has imported it already, and a monitor beside the job does not need it.
"""
