"""FO804 rollout-dominates

What it does
Finds rollouts, games or generations that take a tenth of the job or more, between training steps.

Why it costs
The model is asked for one action or one token at a time, and the simulator answers in Python. Each call has
a single row, so the device does almost nothing while the host is busy.

Evidence
Steps that take several times as long as usual are examined: stack samples of the training thread, about 25
per second over the whole run, name the outermost line that no typical step has on its stack; models are
called there, and no loader is trained on. The share is of the job's time after set-up, spread over the
steps in which it was seen. The ceiling is the speed-up of the job if that time cost nothing.

Fix
Run many games or samples through one call of the model, or make them in other processes:

```diff
-for game in games:
-    action = policy(game.state[None])
-    game.step(action)
+actions = policy(states)                 # [games, state], one call for all of them
+states, rewards = games.step(actions)    # a simulator over arrays, or gymnasium.vector.AsyncVectorEnv
```

Fix safety
Lossy: random numbers are drawn in another order, and rollouts made during training use weights that are a
step old.
"""

from __future__ import annotations

from flatout.doctor.outside import ARMS as ARMS
from flatout.doctor.outside import outside_rule

detect = outside_rule(__doc__, "rollout", what="generates data with the model between training steps")
