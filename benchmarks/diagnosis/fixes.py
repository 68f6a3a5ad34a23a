"""The planted scripts with their fault mended and nothing else changed: what is really gained.

The clean twins of tests/planted differ from the planted scripts in more than the fault, because they hold
what only looks like one.  So each planted script is mended here by replacing its guilty lines.  `WORKERS`
stands for the number of workers that the finding's arm ran with.  Folders without an entry have a clean twin
that is the mended script.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLANTED = ROOT / "tests" / "planted"
DARKROOM = ROOT / "examples" / "darkroom"

FIXES: dict[str, tuple[tuple[str, str], ...]] = {
    "batch_of_one_forwards": (
        (
            """    outputs = []
    for molecule in molecules.split(1):
        outputs.append(model(molecule))  # guilty
    return torch.cat(outputs).squeeze(-1)
""",
            """    return model(molecules).squeeze(-1)
""",
        ),
    ),
    "concatenating_collate": (
        (
            """    batch = np.zeros((0, longest, windows[0].shape[1]), dtype=np.float32)
    for window in windows:
        padded = np.zeros((1, longest, window.shape[1]), dtype=np.float32)
        padded[0, : len(window)] = window
        batch = np.concatenate([batch, padded])  # guilty
""",
            """    batch = np.zeros((len(windows), longest, windows[0].shape[1]), dtype=np.float32)
    for row, window in enumerate(windows):
        batch[row, : len(window)] = window
""",
        ),
    ),
    "recurrent_cell_loop": (
        ("nn.LSTMCell(joints, hidden)", "nn.LSTM(joints, hidden, batch_first=True)"),
        (
            """        h = frames.new_zeros(len(frames), self.hidden)
        c = torch.zeros_like(h)
        for frame in frames.unbind(1):
            h, c = self.cell(frame, (h, c))  # guilty
        return self.head(h)
""",
            """        _outputs, (h, _c) = self.cell(frames)
        return self.head(h.squeeze(0))
""",
        ),
    ),
    "row_indexing_in_loop": (
        (
            """        last = []
        for document, length in enumerate(lengths):
            last.append(hidden[document, length - 1])  # guilty
        return self.score(torch.stack(last)).squeeze(-1)
""",
            """        rows = torch.arange(len(documents), device=hidden.device)
        last = hidden[rows, torch.tensor(lengths, device=hidden.device) - 1]
        return self.score(last).squeeze(-1)
""",
        ),
    ),
    "single_process_loading": (
        ("shuffle=True)  # guilty", "shuffle=True, num_workers=WORKERS, persistent_workers=True)"),
    ),
    "sync_in_step": (
        (".norm().item())  # guilty on cuda", ".norm())"),
        ("norms[-1], 4", "norms[-1].item(), 4"),
    ),
    "tensor_created_in_loop": (
        (
            """        pieces = []
        for board in boards:
            for kind in board:
                index = torch.tensor([kind], device=self.device)  # guilty
                pieces.append(self.kind(index))
        return torch.cat(pieces).view(len(boards), -1, self.kind.embedding_dim)
""",
            """        return self.kind(torch.tensor(boards, device=self.device))
""",
        ),
    ),
    "unbucketed_padding": (
        (
            """def collate(samples):
""",
            """class SimilarLengths:
    def __init__(self, lengths, batch_size):
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]

    def __iter__(self):
        random.shuffle(self.batches)
        yield from self.batches

    def __len__(self):
        return len(self.batches)


def collate(samples):
""",
        ),
        (
            "batch_size=32, shuffle=True, collate_fn=collate)  # guilty on cpu",
            "batch_sampler=SimilarLengths([len(words) for words, _ in data], 32), collate_fn=collate)",
        ),
    ),
}

ONE_GATHER = '''
        """Tokens of every sample, padded with zeros at the end to the longest one: B L D."""
        batch, rows, width = context.shape
        kinds = self.token_type.weight
        start = (self.region_start + kinds[1]).expand(batch, 1, width)
        end = (self.region_end + kinds[2]).expand(batch, 1, width)
        nothing = context.new_zeros(batch, 1, width)
        table = torch.cat([context + kinds[0], start, end, query + kinds[0], nothing], dim=1)
        orders = [
            ([rows, *range(previous), rows + 1] if previous else [])
            + [rows, *range(previous, previous + current), rows + 2]
            for previous, current in zip(previous_length, current_length)
        ]
        longest = max(map(len, orders))
        index = torch.tensor([order + [rows + 3] * (longest - len(order)) for order in orders])
        return table.gather(1, index.to(context.device).unsqueeze(-1).expand(-1, -1, width))
'''


def needs_workers(rule: str) -> bool:
    """Whether the mended script depends on the number of workers that a diagnosis advises."""
    return any("WORKERS" in new for _old, new in FIXES.get(rule, ()))


def mended(rule: str, *, workers: int = 2) -> str:
    """The text of a planted script without its fault."""
    folder = PLANTED / rule
    if rule not in FIXES:
        return (folder / "clean.py").read_text()
    text = (folder / "planted.py").read_text().replace("# guilty, largest", "# guilty")
    for old, new in FIXES[rule]:
        if text.count(old) != 1:
            raise ValueError(f"tests/planted/{rule}/planted.py does not hold {old.strip()!r} once")
        text = text.replace(old, new.replace("WORKERS", str(workers)))
    return text


def digest(rule: str) -> str:
    """Changes when the code of a planted script or of its mended form does; their comments do not count."""
    texts = ((PLANTED / rule / "planted.py").read_text(), mended(rule))
    code = re.sub(r"\s*#.*", "", "\n".join(texts))
    return hashlib.sha256(code.encode()).hexdigest()[:12]


def darkroom_with_one_gather(folder: Path) -> Path:
    """Copy examples/darkroom to `folder`, its loops over rows as one gather; return train.py there."""
    for file in DARKROOM.glob("*.py"):
        (folder / file.name).write_text(file.read_text())
    text = (DARKROOM / "model.py").read_text()
    head, signature, body = text.partition("    ) -> Tensor:\n")
    _old, mark, tail = body.partition("    # ruff: enable[E501]")
    (folder / "model.py").write_text(head + signature + ONE_GATHER.lstrip("\n") + mark + tail)
    return folder / "train.py"
