"""The verbs as Python functions: the only place where rooms are composed.

The command line calls these, and so may anyone; `flatout` itself exports the everyday ones.  A verb that is
one function of a room is that function.  Names are imported on first use.

diagnosis  diagnose a script, a loop or saved Evidence
tuning     make a script faster by proven changes, and compare two versions of it
plans      read this machine, predict the memory of a job, and fit it to a GPU
runs       watch jobs, and list, report and compare the runs of every verb
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.ground.lazy_names import lazy_names as _lazy_names

if TYPE_CHECKING:
    from flatout.api.diagnosis import diagnose as diagnose
    from flatout.api.diagnosis import diagnose_evidence as diagnose_evidence
    from flatout.api.diagnosis import diagnose_script as diagnose_script
    from flatout.api.diagnosis import write_diagnosis as write_diagnosis
    from flatout.api.plans import fit as fit
    from flatout.api.plans import plan as plan
    from flatout.api.plans import read_machine as read_machine
    from flatout.api.runs import compare_runs as compare_runs
    from flatout.api.runs import list_runs as list_runs
    from flatout.api.runs import replay_run as replay_run
    from flatout.api.runs import report_run as report_run
    from flatout.api.runs import serve_run as serve_run
    from flatout.api.runs import sink_choice as sink_choice
    from flatout.api.runs import watch_fleet as watch_fleet
    from flatout.api.runs import watch_live as watch_live
    from flatout.api.runs import watch_on_page as watch_on_page
    from flatout.api.runs import watch_once as watch_once
    from flatout.api.runs import watch_script as watch_script
    from flatout.api.tuning import apply_patches as apply_patches
    from flatout.api.tuning import check_script as check_script
    from flatout.api.tuning import run_tuned as run_tuned
    from flatout.api.tuning import save_tuning as save_tuning
    from flatout.api.tuning import tune_script as tune_script
    from flatout.api.tuning import undo_patches as undo_patches
    from flatout.api.tuning import write_tuning as write_tuning
    from flatout.engines.adapters.verbs import adapt as adapt
    from flatout.engines.adapters.verbs import adapt_evaluate as adapt_evaluate
    from flatout.engines.adapters.verbs import adapt_export as adapt_export
    from flatout.engines.adapters.verbs import adapt_predict as adapt_predict
    from flatout.engines.adapters.verbs import adapt_status as adapt_status
    from flatout.engines.evolution.training.trainer import evolve as evolve
    from flatout.engines.evolution.verify import verify_evolution as verify_evolution
    from flatout.engines.run.fetch_model import fetch_model as fetch_model
    from flatout.engines.steering.verbs import steer as steer
    from flatout.engines.steering.verbs import steer_apply as steer_apply
    from flatout.engines.steering.verbs import steer_convert as steer_convert
    from flatout.engines.steering.verbs import steer_extract as steer_extract
    from flatout.engines.steering.verbs import steer_fit as steer_fit
    from flatout.engines.steering.verbs import steer_report as steer_report
    from flatout.hardware.matching import all_datasheets as all_datasheets
    from flatout.hardware.simulated import simulated_device as simulated_device
    from flatout.planner.plan import apply_config as apply_config
    from flatout.planner.plan import fit_config as fit_config
    from flatout.planner.plan import plan_config as plan_config
    from flatout.planner.plan import undo_config as undo_config
else:
    __all__, __getattr__, __dir__ = _lazy_names(__name__)
