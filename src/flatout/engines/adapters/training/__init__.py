"""Training: three phases, each a function of a `PhaseRun` that counts steps, reports, keeps and stops.

batches           which rows a step trains on
phase             what every phase does besides training: report, checkpoint, stop
phase1_adapters   an adapter and a head per task
phase2_router     the router, on features of the frozen encoder
phase3_joint      router, adapters and heads together
validation        scores on held-out rows while training
records           the log of a run, and a phase on disk
live_line         machine and training in one line
"""
