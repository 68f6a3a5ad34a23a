"""Examples for clusters: what they would start is read by the parsers of those who would be started."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from flatout.cli.app import all_verbs
from flatout.monitor.sample import GpuSample, HostSample, JobSample, Sample
from flatout.monitor.sinks.figures import figures
from flatout.monitor.sinks.prometheus import MetricsEndpoint, exposition, metric_name

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FLEET = EXAMPLES / "fleet"
VERBS = {tuple(name.split()): command for name, command in all_verbs()}
# Each writes its arguments, ended by zeros, as one line; srun does what it is asked to, for one task.
RECORD = '#!/bin/bash\nprintf "%s\\0" "$(basename "$0")" "$@" >> "$CALLS"; echo >> "$CALLS"\n'
SHIMS = {
    "torchrun": RECORD,
    "flatout": RECORD,
    "ray": RECORD,
    "srun": '#!/bin/bash\nexec "$@"\n',
    "scontrol": "#!/bin/bash\nprintf 'node-%s\\n' 0 1\n",
}
SLURM = {
    "SLURM_JOB_NODELIST": "node-[0-1]",
    "SLURM_NNODES": "2",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURM_JOB_ID": "77",
    "SLURMD_NODENAME": "node-1",
}
SKY = {
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "2",
    "SKYPILOT_NODE_RANK": "0",
}


def calls(command: Sequence[str], folder: Path, variables: dict[str, str]) -> list[list[str]]:
    """What a script starts, with everything it starts made up."""
    for name, text in SHIMS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    record = folder / "calls"
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(record), **variables}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [line.split("\0")[:-1] for line in record.read_text().split("\n")[:-1]]


def check_flatout(arguments: Sequence[str]) -> str:
    """Parse a command line of flatout as the command itself would; return its verb."""
    name = next(name for name in VERBS if tuple(arguments[: len(name)]) == name)
    VERBS[name].make_context(" ".join(name), list(arguments[len(name) :]))
    return " ".join(name)


def check_torchrun(arguments: Sequence[str]) -> str:
    from torch.distributed.run import get_args_parser

    known = get_args_parser().parse_args(list(arguments))
    assert known.module and known.training_script == "flatout"
    return check_flatout(known.training_script_args)


def check_call(call: Sequence[str]) -> str:
    program, *arguments = call
    if program == "ray":
        arguments = arguments[arguments.index("--") + 2 :]
    return check_torchrun(arguments) if program == "torchrun" else check_flatout(arguments)


@pytest.mark.parametrize(
    ("script", "arguments", "rank", "verbs"),
    [
        ("diagnose", ["train.py", "--epochs", "3"], "0", ["diagnose", "diagnose"]),
        ("evolve", ["sums.yaml"], "0", ["evolve"]),
        ("search", ["syc.yaml", "postgresql://user@host/studies"], "0", ["steer search"]),
        ("search", ["syc.yaml", "postgresql://user@host/studies"], "1", ["steer search"] * 2),
    ],
)
def test_sbatch_files_start_what_the_parsers_take(
    script: str, arguments: list[str], rank: str, verbs: list[str], tmp_path: Path
) -> None:
    variables = {**SLURM, "SLURM_PROCID": rank, "SLURM_SUBMIT_DIR": str(tmp_path)}
    found = calls(["bash", str(EXAMPLES / "slurm" / f"{script}.sbatch"), *arguments], tmp_path, variables)
    assert [check_call(call) for call in found] == verbs
    if script != "search":
        assert "node-0:29500" in found[0]


def test_a_requeued_job_resumes(tmp_path: Path) -> None:
    (tmp_path / "runs" / "77").mkdir(parents=True)
    variables = {**SLURM, "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_RESTART_COUNT": "1"}
    (call,) = calls(["bash", str(EXAMPLES / "slurm" / "evolve.sbatch"), "sums.yaml"], tmp_path, variables)
    assert call[-1] == "--resume"
    assert check_call(call) == "evolve"


def test_the_ray_job_starts_what_the_parser_takes(tmp_path: Path) -> None:
    (call,) = calls(
        ["bash", str(EXAMPLES / "cluster" / "ray_job.sh"), "http://head:8265", "syc.yaml"], tmp_path, {}
    )
    assert call[:3] == ["ray", "job", "submit"]
    assert check_call(call) == "steer search"


def read(path: Path) -> Any:
    return YAML(typ="safe").load(path.read_text(encoding="utf-8"))


def test_train_jobs_have_the_shape_of_the_api() -> None:
    paths = sorted((EXAMPLES / "cluster").glob("*trainjob.yaml"))
    assert len(paths) == 2
    for path in paths:
        job = read(path)
        assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
        assert set(job["spec"]) == {"runtimeRef", "trainer"}
        trainer = job["spec"]["trainer"]
        assert set(trainer) == {"image", "numNodes", "command", "args", "resourcesPerNode"}
        assert trainer["command"] == ["torchrun"]
        assert all(isinstance(argument, str) for argument in trainer["args"])
        check_torchrun(trainer["args"])


def test_the_skypilot_task_starts_what_the_parsers_take(tmp_path: Path) -> None:
    task = read(EXAMPLES / "cluster" / "skypilot.yaml")
    assert set(task) == {"name", "num_nodes", "resources", "workdir", "file_mounts", "setup", "run"}
    (call,) = calls(["bash", "-e", "-c", task["run"]], tmp_path, SKY)
    assert check_call(call) == "evolve"
    assert "10.0.0.1" in call


# A fleet


def exported() -> set[str]:
    """Every name that the exporter knows."""
    whole = Sample(time_s=0.0, host=HostSample(), gpus=(GpuSample(index=0),), job=JobSample(pid=1))
    return {metric_name(figure) for figure in figures(whole)}


def queries() -> Iterator[str]:
    dashboard = json.loads((FLEET / "grafana" / "flatout.json").read_text())
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (variable["query"]["query"] for variable in dashboard["templating"]["list"])
    for group in read(FLEET / "alerts.yml")["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


def test_every_figure_that_is_asked_for_is_exported() -> None:
    named = {name for query in queries() for name in re.findall(r"flatout_\w+", query)}
    assert len(named) > 12
    assert named <= exported()


def test_every_file_that_the_services_mount_is_there() -> None:
    services = read(FLEET / "compose.yaml")["services"]
    mounts = [mount for service in services.values() for mount in service["volumes"]]
    files = [mount.partition(":")[0] for mount in mounts if mount.startswith("./")]
    assert len(files) == 6
    assert [name for name in files if not (FLEET / name).is_file()] == []


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: apt-get install prometheus")
    return found


@pytest.mark.parametrize(
    "check", ["config prometheus.yml", "config node.yml", "rules alerts.yml", "test rules alerts_test.yml"]
)
def test_prometheus_takes_the_files(check: str) -> None:
    words = check.split() if check.startswith("test") else ["check", *check.split()]
    done = subprocess.run([tool("promtool"), *words], cwd=FLEET, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def wait_until(look: Callable[[], Any], *, longest_s: float = 120.0) -> Any:
    deadline_s = time.monotonic() + longest_s
    while not (found := look()):
        assert time.monotonic() < deadline_s, "it never came"
        time.sleep(0.05)
    return found


def test_prometheus_keeps_what_is_served(tmp_path: Path) -> None:
    sample = Sample(time_s=1.0, host=HostSample(cores=8.0), job=JobSample(pid=7, name='a "job"', steps=41))
    subprocess.run([tool("promtool"), "check", "metrics"], input=exposition(sample).encode(), check=True)
    endpoint = MetricsEndpoint(0)
    endpoint(sample)
    config = read(FLEET / "prometheus.yml")
    target = {"targets": [f"127.0.0.1:{endpoint.port}"]}
    config["scrape_configs"] = [
        {
            "job_name": "flatout",
            "scrape_interval": "100ms",
            "scrape_timeout": "100ms",
            "static_configs": [target],
        }
    ]
    shutil.copy(FLEET / "alerts.yml", tmp_path)
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    log = tmp_path / "log"
    with log.open("wb") as said:
        server = subprocess.Popen(
            [
                tool("prometheus"),
                f"--config.file={tmp_path / 'prometheus.yml'}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stderr=said,
        )
    try:
        address = wait_until(lambda: re.search(r"address=(127[\d.]+:[1-9]\d*)", log.read_text()))[1]
        question = urllib.parse.urlencode({"query": "flatout_job_steps_total"})

        def answer() -> Any:
            try:
                with urllib.request.urlopen(f"http://{address}/api/v1/query?{question}") as reply:
                    return json.load(reply)["data"]["result"]
            except urllib.error.URLError:  # it listens before it is ready
                return None

        (found,) = wait_until(answer)
        assert (found["metric"]["job_name"], found["value"][1]) == ('a "job"', "41")
    finally:
        server.kill()
        server.wait()
        endpoint.close()
