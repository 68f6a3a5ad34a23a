"""Does the model learn inside its context?  Rollouts in goals it never saw, all environments at once.

    python examples/darkroom/train_fast.py --mend --save darkroom.safetensors
    python examples/darkroom/evaluate.py darkroom.safetensors --json rollout.json --plot rollout.png

The weights stay as they are; the only thing that changes from episode to episode is what the model has
seen.  An agent that learned a reward-seeking habit from the histories earns more in later episodes of a
stream than in its first ones.  Beside it stand an agent that acts at random, the scripted learner of the
training histories, and one that knows the goal.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fast_model import FastDarkroom
from histories import EPISODE_STEPS, GRID, learning_histories, split_goals
from numpy.typing import NDArray
from rollout import optimal_returns, random_returns, returns_by_episode

from flatout.ground.errors import BadInput, FlatoutError, MissingExtra, import_extra

NUM_COMPARED = 5  # episodes at either end of the stream
NUM_RESAMPLES = 2000

Doubles = NDArray[np.float64]


def main(argv: Sequence[str] | None = None) -> None:
    settings = read_settings(argv)
    try:
        model, known = load(Path(settings.checkpoint), device=settings.device)
        result = evaluate(model, known, settings)
        if settings.json:
            Path(settings.json).write_text(json.dumps(result, indent=1) + "\n")
        print_table(result)
        if settings.plot:
            draw(result, Path(settings.plot))
    except MissingExtra as error:
        print(f"no plot: {error}", file=sys.stderr)
    except FlatoutError as error:
        raise SystemExit(f"evaluate.py: {error}") from error


def evaluate(model: FastDarkroom, known: dict[str, int], settings: argparse.Namespace) -> dict[str, Any]:
    """Returns per episode in held-out goals and, for comparison, in goals of the training."""
    training, held_out = split_goals(known["goals"], seed=known["seed"])
    if not len(held_out):
        raise BadInput(
            f"the model was trained on all {GRID * GRID} goals; none is left to test it on",
            hint="train it with fewer --goals",
        )
    result: dict[str, Any] = {
        "environments_per_goal": settings.environments,
        "episodes": settings.episodes,
        "episode_steps": EPISODE_STEPS,
        "seed": settings.seed,
        "hardware": torch.cuda.get_device_name() if settings.device.startswith("cuda") else "CPU",
        "trained_with": known,
    }
    for name, goals in (("held_out", held_out), ("training", training[: len(held_out)])):
        repeated = np.repeat(goals, settings.environments, axis=0)
        goals_E2 = torch.from_numpy(repeated).to(settings.device)
        options = {"num_episodes": settings.episodes, "seed": settings.seed}
        returns = returns_by_episode(model, goals_E2, **options, temperature=settings.temperature)
        result[name] = {
            "goals": goals.tolist(),
            "model": curve(returns.double().cpu().numpy()),
            "random": curve(random_returns(goals_E2, **options).double().cpu().numpy()),
            "learner": curve(learner_returns(repeated, **options)),
            "optimal": float(optimal_returns(goals_E2).mean()),
        }
    return result


def curve(returns: Doubles) -> dict[str, Any]:
    """Mean return of each episode with its standard error, and the rise from the first to the last ones."""
    early, late = returns[:, :NUM_COMPARED].mean(axis=1), returns[:, -NUM_COMPARED:].mean(axis=1)
    random = np.random.default_rng(0)
    drawn = random.integers(len(returns), size=(NUM_RESAMPLES, len(returns)))
    low, high = np.percentile((late - early)[drawn].mean(axis=1), [2.5, 97.5])
    return {
        "mean_by_episode": returns.mean(axis=0).round(4).tolist(),
        "standard_error_by_episode": (returns.std(axis=0) / np.sqrt(len(returns))).round(4).tolist(),
        "first_episodes": float(early.mean()),
        "last_episodes": float(late.mean()),
        "rise": float((late - early).mean()),
        "rise_low": float(low),
        "rise_high": float(high),
    }


def learner_returns(goals: NDArray[np.int8], *, num_episodes: int, seed: int) -> Doubles:
    """What the scripted learner of the training earns when its history is as long as the stream."""
    histories = learning_histories(
        goals, histories_per_goal=1, num_steps=num_episodes * EPISODE_STEPS, seed=seed
    )
    rewards = histories.rewards.reshape(len(goals), num_episodes, EPISODE_STEPS)
    returns: Doubles = rewards.sum(axis=2, dtype=np.float64)
    return returns


def load(path: Path, *, device: str) -> tuple[FastDarkroom, dict[str, int]]:
    """The model of a checkpoint, and what its training says of itself."""
    safetensors = import_extra("safetensors", extra="adapters")
    try:
        with safetensors.safe_open(path, framework="pt", device=device) as file:
            known = {name: int(value) for name, value in (file.metadata() or {}).items()}
            weights = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, safetensors.SafetensorError) as error:
        raise BadInput(
            f"{path} cannot be read: {error}", hint="make one with train_fast.py --save"
        ) from error
    missing = {"mend", "goals", "seed"} - known.keys()
    if missing:
        raise BadInput(
            f"{path} does not say its {', '.join(sorted(missing))}", hint="make one with train_fast.py --save"
        )
    model = FastDarkroom(mend=bool(known["mend"])).to(device)
    model.load_state_dict(weights)
    return model.eval(), known


def print_table(result: dict[str, Any]) -> None:
    last = result["episodes"] - NUM_COMPARED + 1
    heads = (f"episodes 1–{NUM_COMPARED}", f"{last}–{result['episodes']}", "rise", "95 % interval")
    print(f"{'goals':9} {'agent':8} {heads[0]:>14} {heads[1]:>8} {heads[2]:>8} {heads[3]:>16}")
    for goals in ("held_out", "training"):
        for agent in ("model", "learner", "random"):
            found = result[goals][agent]
            interval = f"[{found['rise_low']:.2f}, {found['rise_high']:.2f}]"
            print(
                f"{goals:9} {agent:8} {found['first_episodes']:14.2f} {found['last_episodes']:8.2f}"
                f" {found['rise']:8.2f} {interval:>16}"
            )
        print(f"{goals:9} {'optimal':8} {result[goals]['optimal']:14.2f} {result[goals]['optimal']:8.2f}")


def draw(result: dict[str, Any], path: Path) -> None:
    """Return by episode, one panel for held-out goals and one for goals of the training."""
    import_extra("matplotlib", extra="plots").use("Agg")
    pyplot = import_extra("matplotlib.pyplot", extra="plots")
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    episodes = np.arange(1, result["episodes"] + 1)
    titles = {"held_out": "goals never seen in training", "training": "goals of the training"}
    for panel, (goals, title) in zip(panels, titles.items(), strict=True):
        found = result[goals]
        for agent, colour in (("model", "#d84315"), ("learner", "#1565c0"), ("random", "#757575")):
            mean = np.array(found[agent]["mean_by_episode"])
            error = 1.96 * np.array(found[agent]["standard_error_by_episode"])
            panel.plot(episodes, mean, color=colour, label=agent)
            panel.fill_between(episodes, mean - error, mean + error, color=colour, alpha=0.2, linewidth=0)
        panel.axhline(found["optimal"], color="black", linestyle=":", label="optimal")
        panel.set(title=title, xlabel="episode of the stream", ylim=(0, EPISODE_STEPS))
    panels[0].set_ylabel(f"return of {EPISODE_STEPS} steps")
    panels[1].legend(loc=(0.03, 0.5))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def read_settings(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="weights saved by train_fast.py --save")
    parser.add_argument("--episodes", type=int, default=50, help="episodes of a stream (default: 50)")
    parser.add_argument("--environments", type=int, default=32, help="streams per goal (default: 32)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the sampled actions (default: 1)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ... (default: auto)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--plot", metavar="FILE", help="draw them there, a PNG; needs matplotlib")
    settings = parser.parse_args(argv)
    if settings.device == "auto":
        settings.device = "cuda" if torch.cuda.is_available() else "cpu"
    if settings.episodes < 2 * NUM_COMPARED:
        parser.error(f"--episodes {settings.episodes}: at least {2 * NUM_COMPARED}")
    if settings.environments < 1:
        parser.error(f"--environments {settings.environments}: at least 1")
    if settings.temperature <= 0:
        parser.error(f"--temperature {settings.temperature}: above 0")
    return settings


if __name__ == "__main__":
    main()
