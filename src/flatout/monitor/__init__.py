"""The monitor: what a run does, live and afterwards.

    sample.py        the Sample, which everything else makes or takes; many samples as one
    sampler.py       one thread that asks the meters and gives every Sample to its listeners
    open_sampler.py  what `flatout watch` puts together: the job, the sampler, the sinks, the log
    meters/          the host, GPUs and processes, read again and again
    job/             `flatout.watch` and `flatout watch --run`: a job that reports its steps
    verdicts/        what bounds the run, in one sentence
    terminal/        the live line, and the view that fills a terminal
    web/             the page
    fleet/           many nodes seen from one place
    past/            the log of a run, its figures, two runs compared, its report
    sinks/           the formats of other tools: JSON lines, CSV, TensorBoard, Prometheus

Nothing here imports torch: a job has imported it already, and a monitor beside the job does not need it.
"""
