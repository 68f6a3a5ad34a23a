"""FO303 recurrent-cell-loop

What it does
Finds a recurrent cell or layer that a Python loop calls once per time step. `nn.LSTMCell`, `nn.GRUCell` and
`nn.RNNCell` compute one step of one layer; `nn.LSTM`, `nn.GRU` and `nn.RNN` compute the whole sequence in
one call, unless a loop gives them one position at a time.

Why it costs
Each call multiplies the input and the hidden state by small matrices and creates its own backward nodes.
Over a whole sequence the input's products do not depend on the hidden state: the sequence modules compute
them as one large product, and on a GPU cuDNN runs the rest as a few fused kernels instead of several
launches per time step.

Evidence
One line calls cells, or layers on one position, at least 8 times per step, and these calls, with the
backward nodes they create, hold at least 5 % of the step; if the time of the calls is unknown, the forward
pass stands in for it. The ceiling is measured: steps in which a sequence module of the same sizes replaces
the cells or, if it cannot, steps without the loop. One call on a whole sequence also saves the rest of the
loop, so a layer's ceiling is that of steps without its line, if a single call in its place gains as well. A
loop in which an input is computed from an earlier output is not reported, nor is a layer's for which that
could not be tried.

Fix
Run the whole sequence through `nn.LSTM`, `nn.GRU` or `nn.RNN` in one call:

```diff
-self.cell = nn.LSTMCell(width, hidden)
-for t in range(length):
-    state = self.cell(x[:, t], state)
+self.rnn = nn.LSTM(width, hidden, batch_first=True)
+outputs, state = self.rnn(x)
-for t in range(length):                                # a layer, one position at a time
-    output, state = self.rnn(x[:, t : t + 1], state)
-    loss += criterion(self.head(output[:, 0]), target[:, t])
+outputs, state = self.rnn(x, state)
+loss = criterion(self.head(outputs).flatten(0, 1), target.flatten())
```

Weights carry over by name: `weight_ih` becomes `weight_ih_l0`. If each input depends on the previous
output, as in decoding, the loop has to stay: capture it with `torch.compile` or a CUDA graph instead.

Fix safety
Reordered: the same recurrence, summed in another order.
"""

from __future__ import annotations

from flatout.doctor.ceilings import arm_at, prove, share_of
from flatout.doctor.finding import Finding
from flatout.doctor.lines import LAYERS, CodeLine, line_share, lines_of, show_calls, show_ops, show_timing
from flatout.doctor.rule import title_of
from flatout.ground.units import show_share
from flatout.measure.arms.arm import DEPENDS
from flatout.measure.evidence import Evidence
from flatout.measure.run.step_blocks.schedule import NO_TIME

ARMS = ("library-recurrence", "knock-out")
RULE = title_of(__doc__, arms=ARMS)
LEAST_CALLS = 8
LEAST_SHARE = 0.05
WHOLE_SEQUENCE = "give the layer the whole sequence in one call: its inputs are known before the loop"


def detect(evidence: Evidence) -> list[Finding]:
    findings = []
    for line in lines_of([site for site in evidence.sites if site.kind == "cell"]):
        if line.calls_per_step < LEAST_CALLS or not _may_be_one_call(evidence, line):
            continue
        share = line_share(evidence, line)
        known = share is not None
        if share is None:
            share = share_of(evidence.phase_s("forward"), evidence.step_s)
        if share is not None and share >= LEAST_SHARE:
            findings += _finding(evidence, line, share=share, known=known)
    return findings


def _is_layer(line: CodeLine) -> bool:
    return any(op in LAYERS for op in line.ops)


def _may_be_one_call(evidence: Evidence, line: CodeLine) -> bool:
    """Return whether no input is known to need an earlier output; of a layer, whether that was tried."""
    reasons = [
        left_out.reason
        for left_out in evidence.arms_not_run
        if left_out.kind == ARMS[0] and left_out.place is not None and left_out.place.at == line.place.at
    ]
    if any(DEPENDS in reason for reason in reasons):
        return False
    if not _is_layer(line):
        return True
    if arm_at(evidence, ARMS[0], line.place) is not None:
        return not prove(evidence, ARMS[:1], place=line.place).refuted
    return any(reason != NO_TIME for reason in reasons)


def _finding(evidence: Evidence, line: CodeLine, *, share: float, known: bool) -> list[Finding]:
    calls = show_calls(line.calls_per_step)
    cells = show_ops(line)
    rows = " on one position" if _is_layer(line) else ""
    around = f"the forward pass around it takes {show_share(share)} of the step"
    return RULE.proven(
        evidence,
        line.place,
        f"{cells} is called {calls} times per step here{rows}, {show_share(share)} of the step",
        figures=(
            f"{cells}: {calls} calls per step from this line",
            show_timing(evidence, line) if known else around,
        ),
        arms=ARMS[::-1] if _is_layer(line) else None,
        share=share,
        fix=WHOLE_SEQUENCE if _is_layer(line) else None,
    )
