"""Examples for clusters: what they would start is read by the parsers of those who would be started."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
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
from flatout.engines.run.log import is_written, log_path
from flatout.monitor.sample import GpuSample, HostSample, JobSample, Sample
from flatout.monitor.sinks.figures import figures
from flatout.monitor.sinks.prometheus import MetricsEndpoint, exposition, metric_name
from tests.support.evolution import save_tiny, tiny_settings
from tests.support.warm_python import warm

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FLEET = EXAMPLES / "fleet"
VERBS = {tuple(name.split()): command for name, command in all_verbs()}
# Each writes its arguments, ended by zeros; srun does what it is asked to, for one task.
# One write for each call: several of them share the file.
RECORD = '#!/bin/bash\nprintf "%s\\0" "$(basename "$0")" "$@" END >> "$CALLS"\n'
SHIMS = {
    "torchrun": RECORD,
    "flatout": RECORD,
    "ray": RECORD,
    # srun does not read the cores of a task from its batch script.
    "srun": '#!/bin/bash\n: "${SRUN_CPUS_PER_TASK:?}"\n[[ $1 == --* ]] && shift\nexec "$@"\n',
    "scontrol": "#!/bin/bash\nprintf 'node-%s\\n' 0 1\n",
}
SLURM = {
    "SLURM_JOB_NODELIST": "node-[0-1]",
    "SLURM_NNODES": "2",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURM_CPUS_PER_TASK": "8",
    "SLURM_JOB_ID": "77",
    "SLURMD_NODENAME": "node-1",
}
SKY = {
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "2",
    "SKYPILOT_NODE_RANK": "0",
    "SKYPILOT_TASK_ID": "sky-managed-2026-11-19_evolve-sums_1-0",
}


def calls(command: Sequence[str], folder: Path, variables: dict[str, str], **shims: str) -> list[list[str]]:
    """What a script starts, with everything it starts made up."""
    for name, text in (SHIMS | shims).items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    record = folder / "calls"
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(record), **variables}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [call.split("\0") for call in record.read_text().split("\0END\0")[:-1]]


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


def test_a_worker_that_cannot_join_gives_up_when_the_search_has_its_result(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "77"
    out.mkdir(parents=True)
    (out / "result.json").touch()
    command = [
        "bash",
        str(EXAMPLES / "slurm" / "search.sbatch"),
        "syc.yaml",
        "postgresql://user@host/studies",
    ]
    variables = {**SLURM, "SLURM_PROCID": "1", "SLURM_SUBMIT_DIR": str(tmp_path)}
    found = calls(command, tmp_path, variables, flatout=RECORD + "exit 2\n", sleep=RECORD + "exit 1\n")
    assert [call[0] for call in found] == ["flatout", "flatout"]


def test_the_ray_job_starts_what_the_parser_takes(tmp_path: Path) -> None:
    (call,) = calls(
        ["bash", str(EXAMPLES / "cluster" / "ray_job.sh"), "http://head:8265", "syc.yaml"], tmp_path, {}
    )
    assert call[:3] == ["ray", "job", "submit"]
    assert check_call(call) == "steer search"


def read(path: Path) -> Any:
    return YAML(typ="safe").load(path.read_text(encoding="utf-8"))


def train_jobs() -> dict[str, Any]:
    """The documents of a file by their kinds, in the shape of the API."""
    found = {}
    for path in sorted((EXAMPLES / "cluster").glob("*trainjob.yaml")):
        documents = list(YAML(typ="safe").load_all(path.read_text(encoding="utf-8")))
        assert {each["apiVersion"] for each in documents} == {"trainer.kubeflow.org/v1alpha1"}
        found[path.stem] = {each["kind"]: each for each in documents}
    return found


def test_train_jobs_have_the_shape_of_the_api() -> None:
    jobs = train_jobs()
    assert jobs.keys() == {"trainjob", "diagnose_trainjob"}
    for kinds in jobs.values():
        spec = kinds["TrainJob"]["spec"]
        assert set(spec) == {"runtimeRef", "trainer"}
        trainer = spec["trainer"]
        assert set(trainer) - {"image"} == {"numNodes", "command", "args", "resourcesPerNode"}
        assert trainer["command"] == ["torchrun"]
        assert all(isinstance(argument, str) for argument in trainer["args"])
        check_torchrun(trainer["args"])


def test_the_runtime_of_a_train_job_mounts_what_its_command_names() -> None:
    kinds = train_jobs()["trainjob"]
    runtime, spec = kinds["TrainingRuntime"], kinds["TrainJob"]["spec"]
    assert spec["runtimeRef"] == {"kind": "TrainingRuntime", "name": runtime["metadata"]["name"]}
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    (container,), (volume,) = pod["containers"], pod["volumes"]
    assert job["name"] == container["name"] == "node"  # what Trainer looks for
    (mount,) = container["volumeMounts"]
    assert mount["name"] == volume["name"] and "image" in container
    paths = [argument for argument in spec["trainer"]["args"] if argument.startswith("/")]
    assert len(paths) == 2 and all(path.startswith(f"{mount['mountPath']}/") for path in paths)


@pytest.mark.timeout(600)
def test_pods_that_are_started_again_go_on(tmp_path: Path) -> None:
    """The command of the TrainJob with the variables that Trainer sets; both pods are killed in between."""
    trainer = train_jobs()["trainjob"]["TrainJob"]["spec"]["trainer"]
    arguments = [argument.replace("/shared", str(tmp_path)) for argument in trainer["args"]]
    out = tmp_path / "runs" / "sums"
    settings = tiny_settings(save_tiny(tmp_path / "model"), out, checkpoint_every=1)
    del settings["out"]

    def start(epochs: int) -> list[subprocess.Popen[bytes]]:
        (tmp_path / "sums.yaml").write_text(json.dumps({**settings, "epochs": epochs}))  # JSON is YAML
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        variables = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1"}
        variables |= {"PET_MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        return [
            subprocess.Popen(
                [warm().bin / trainer["command"][0], *arguments],
                env={**os.environ, **variables, "PET_NODE_RANK": node},
            )
            for node in "01"
        ]

    pods = start(10**6)
    wait_until(lambda: list((out / "checkpoints").glob("epoch-*2")), longest_s=280.0)
    for pod in pods:  # a rank ends with its agent
        pod.kill()
        pod.wait()
    wait_until(lambda: is_written(out) is False)
    log = log_path(out)
    reached = json.loads(log.read_text().splitlines()[-1])["epoch"]
    assert [pod.wait() for pod in start(reached + 2)] == [0, 0]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    epochs = [line["epoch"] for line in lines if "epoch" in line]
    assert sorted(set(epochs)) == list(range(reached + 3))
    assert len(epochs) <= reached + 4  # one may be done again: killed before its checkpoint was written


def test_the_skypilot_task_starts_what_the_parsers_take(tmp_path: Path) -> None:
    task, volume = (read(EXAMPLES / "cluster" / f"{name}.yaml") for name in ("skypilot", "skypilot_volume"))
    assert set(task) == {"name", "num_nodes", "resources", "workdir", "volumes", "setup", "run"}
    (call,) = calls(["bash", "-e", "-c", task["run"]], tmp_path, SKY)
    assert check_call(call) == "evolve"
    assert "10.0.0.1" in call
    assert call[call.index("--rdzv-id") + 1] == SKY["SKYPILOT_TASK_ID"]  # the same after a recovery
    ((folder, name),) = task["volumes"].items()
    assert call[call.index("--out") + 1].startswith(f"{folder}/") and name == volume["name"]
    assert volume["config"] == {"access_mode": "ReadWriteMany"}


# A fleet


def exported() -> set[str]:
    """Every name that the exporter knows."""
    whole = Sample(time_s=0.0, host=HostSample(), gpus=(GpuSample(index=0),), job=JobSample(pid=1))
    return {metric_name(figure) for figure in figures(whole)}


def dashboard() -> Any:
    return json.loads((FLEET / "grafana" / "flatout.json").read_text())


def dashboard_queries() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]


def variable_queries() -> list[str]:
    return [variable["query"]["query"] for variable in dashboard()["templating"]["list"]]


def test_every_figure_that_is_asked_for_is_exported() -> None:
    rules = [rule["expr"] for group in read(FLEET / "alerts.yml")["groups"] for rule in group["rules"]]
    queries = [*dashboard_queries(), *variable_queries(), *rules]
    named = {name for query in queries for name in re.findall(r"flatout_\w+", query)}
    assert len(named) > 12
    assert named <= exported()


def test_panels_have_room_and_ask_the_provided_source() -> None:
    (source,) = read(FLEET / "grafana" / "datasource.yml")["datasources"]
    panels, variables = dashboard()["panels"], dashboard()["templating"]["list"]
    asked = [each["datasource"] for each in (*panels, *variables)]
    assert all(each == {"type": source["type"], "uid": source["uid"]} for each in asked)
    places = [panel["gridPos"] for panel in panels]
    cells = [
        (column, row)
        for place in places
        for column in range(place["x"], place["x"] + place["w"])
        for row in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells) and max(column for column, _ in cells) < 24  # columns of Grafana
    assert len({panel["id"] for panel in panels}) == len(panels) == 15


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


SAMPLE = Sample(
    time_s=1.0,
    host=HostSample(
        cpu_share=0.5,
        cores=8.0,
        memory_used_bytes=1,
        memory_total_bytes=2,
        network_received_bytes_per_s=3.0,
        network_sent_bytes_per_s=4.0,
    ),
    gpus=(
        GpuSample(
            index=0,
            utilisation_share=0.9,
            sm_active_share=0.5,
            memory_used_bytes=1,
            memory_total_bytes=2,
            power_w=300.0,
            temperature_c=60.0,
        ),
    ),
    job=JobSample(
        pid=7,
        name='a "job"',
        steps=41,
        steps_per_s=2.0,
        samples_per_s=16.0,
        since_step_s=0.1,
        phases={"wait": 0.2},
        loss=1.5,
        energy_per_step_j=100.0,
    ),
)


@contextlib.contextmanager
def prometheus(config: str, *options: str, folder: Path, **variables: str) -> Iterator[str]:
    """A server that runs while the block does; its address."""
    folder.mkdir()
    (folder / "config.yml").write_text(config)
    shutil.copy(FLEET / "alerts.yml", folder)
    log = folder / "log"
    given = [f"--config.file={folder / 'config.yml'}", "--web.listen-address=127.0.0.1:0", *options]
    with log.open("wb") as said:
        server = subprocess.Popen(
            [tool("prometheus"), *given], cwd=folder, env={**os.environ, **variables}, stderr=said
        )
    try:
        yield wait_until(lambda: re.search(r"address=(127[\d.]+:[1-9]\d*)", log.read_text()))[1]
    finally:
        server.kill()
        server.wait()


def ask(address: str, path: str, **question: str) -> Any:
    """What a server answers; None until it is ready."""
    try:
        url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(question)}"
        with urllib.request.urlopen(url) as reply:
            return json.load(reply)["data"]
    except urllib.error.HTTPError as error:
        if error.code == 503:  # it listens before it is ready
            return None
        raise AssertionError(f"{question}: {error.read().decode()}") from error
    except urllib.error.URLError:
        return None


def test_what_a_node_serves_arrives_at_the_centre_and_answers_every_query(tmp_path: Path) -> None:
    """The servers of the compose file, as Debian has them: an agent that asks, and a centre that it tells."""
    subprocess.run([tool("promtool"), "check", "metrics"], input=exposition(SAMPLE).encode(), check=True)
    endpoint = MetricsEndpoint(0)
    endpoint(SAMPLE)
    centre_config = (FLEET / "prometheus.yml").read_text().replace("15s", "200ms")
    node_config = (FLEET / "node.yml").read_text().replace("5s", "200ms")
    version = subprocess.check_output([tool("prometheus"), "--version"], text=True)
    as_agent = "--enable-feature=agent,expand-external-labels" if " version 2." in version else "--agent"
    with (
        contextlib.closing(endpoint),
        prometheus(
            centre_config,
            "--web.enable-remote-write-receiver",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            folder=tmp_path / "centre",
        ) as centre,
        prometheus(
            node_config.replace("127.0.0.1:9401", f"127.0.0.1:{endpoint.port}").replace(
                "centre:9090", centre
            ),
            as_agent,
            f"--storage.agent.path={tmp_path / 'agent'}",
            folder=tmp_path / "node",
            NODE="node-7",
        ),
    ):

        def answer(query: str) -> Any:
            return (ask(centre, "query", query=query) or {}).get("result")

        (found,) = wait_until(lambda: answer("flatout_job_steps_total"))
        assert (found["metric"]["job_name"], found["value"][1]) == ('a "job"', "41")
        shown = [query.replace("$node", ".*") for query in dashboard_queries()]
        assert len(shown) == 17
        assert [query for query in shown if not answer(query)] == []
        assert {
            each["metric"]["node"] for query in shown for each in answer(query) if "node" in each["metric"]
        } == {"node-7"}
        for metric, label in re.findall(r"label_values\((\w+), (\w+)\)", " ".join(variable_queries())):
            assert ask(centre, f"label/{label}/values", **{"match[]": metric}) == ["node-7"]
        groups = wait_until(
            lambda: [
                group
                for group in (ask(centre, "rules") or {"groups": []})["groups"]
                if all(rule["health"] != "unknown" for rule in group["rules"])
            ]
        )
        assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}
