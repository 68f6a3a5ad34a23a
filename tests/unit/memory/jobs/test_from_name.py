"""How a model is named, and what is said when the name or what is behind it is wrong."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from flatout.ground.errors import BadInput, MissingExtra
from flatout.memory.jobs.from_name import load_job
from flatout.memory.jobs.job import Job, Recipe
from flatout.memory.jobs.step import Parts, make_parts, run_step
from flatout.memory.process.isolated_process import run_on_server

COMMON = """
import torch
from torch import nn
from flatout.memory.jobs.job import Job, Recipe

def make_model():
    return nn.Linear(4, 2)

def make_batch(batch_size, length=3):
    return torch.ones(batch_size, length, 4)

def loss(model, batch):
    return model(batch).mean()

def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""
Write = Callable[[str], Path]


@pytest.fixture(autouse=True)
def clean_imports() -> Iterator[None]:
    """Names of modules and folders on the path stay as they were."""
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith(("my_", "flatout_job_")):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A file my_job.py of the common parts and what the test adds."""

    def write_file(code: str) -> Path:
        path = tmp_path / "my_job.py"
        path.write_text(COMMON + textwrap.dedent(code))
        return path

    return write_file


def stepped(job: Job, recipe: Recipe) -> Parts:
    parts = make_parts(job, recipe, device="cpu")
    run_step(parts, job, recipe, job.make_batch(**job.sizes), device="cpu")
    return parts


@pytest.mark.parametrize(
    "returned",
    [
        (
            "Job(name='j', make_model=make_model, make_batch=make_batch, loss=loss, make_optimizer=sgd,"
            " sizes={'batch_size': 8, 'length': 3})"
        ),
        "(make_model, make_batch, loss, sgd)",
        "{'model': make_model, 'batch': make_batch, 'loss': loss, 'optimizer': sgd}",
        "dict(make_model=make_model, make_batch=make_batch, loss=loss, make_optimizer=sgd, recipe=Recipe())",
        "__import__('types').SimpleNamespace(model=make_model(), batch=make_batch, loss=loss, optimizer=sgd)",
        (
            "__import__('collections').namedtuple('Parts', 'model batch loss optimizer')"
            "(make_model, make_batch, loss, sgd)"
        ),
    ],
    ids=["job", "tuple", "dict", "spelled out", "namespace", "namedtuple"],
)
def test_every_shape_of_answer_makes_the_same_job(returned: str, write: Write) -> None:
    job, recipe = load_job(f"{write(f'def build(): return {returned}')}:build")
    assert job.sizes == {"batch_size": 8, "length": 3}
    assert recipe == Recipe()
    parts = stepped(job, recipe)
    assert type(parts.optimizer) is torch.optim.SGD


def test_a_job_of_a_file_reaches_a_process_that_cannot_import_it(write: Write) -> None:
    job, _recipe = load_job(f"{write('def build(): return make_model, make_batch, loss, sgd')}:build")
    assert job.make_model.__module__.startswith("flatout_job_")
    assert run_on_server(lambda: tuple(job.make_model().weight.shape), what="a test") == (2, 4)


def test_a_job_may_bring_its_recipe_its_sizes_and_its_name(write: Write) -> None:
    path = write("""
        job = Job(name='j', make_model=make_model, make_batch=make_batch, loss=loss)
        def pair():
            return job, Recipe(precision='bf16', accumulation=4)
        def parts():
            return dict(model=make_model, batch=make_batch, loss=loss, recipe=Recipe(clip_norm=1.0),
                        sizes={'batch_size': 2, 'length': 9}, name='nine')
    """)
    assert load_job(f"{path}:pair")[1] == Recipe(precision="bf16", accumulation=4)
    job, recipe = load_job(f"{path}:parts")
    assert (job.name, dict(job.sizes), recipe.clip_norm) == ("nine", {"batch_size": 2, "length": 9}, 1.0)
    assert load_job(f"{path}:job")[0].name == "j"


def test_a_pair_of_model_and_example_batch_is_enough_for_a_model_with_a_loss(write: Write) -> None:
    path = write("""
        class Mean(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 1)
            def forward(self, x):
                return self.layer(x).mean()
        def build():
            return Mean(), torch.ones(5, 4)
    """)
    job, recipe = load_job(f"{path}:build")
    assert job.sizes == {"batch_size": 5}
    assert type(stepped(job, recipe).optimizer) is torch.optim.AdamW


def test_settings_reach_a_function_that_takes_them(write: Write) -> None:
    path = write("""
        def taking(settings):
            return lambda: nn.Linear(4, settings['width']), make_batch, loss
        def maybe(settings=None):
            return lambda: nn.Linear(4, (settings or {'width': 2})['width']), make_batch, loss
        def nothing():
            return make_model, make_batch, loss
    """)
    for name in ("taking", "maybe"):
        model = load_job(f"{path}:{name}", settings={"width": 5})[0].make_model()
        assert model.out_features == 5
    assert load_job(f"{path}:maybe")[0].make_model().out_features == 2
    assert load_job(f"{path}:nothing", settings={"width": 5})[0].make_model().out_features == 2
    with pytest.raises(BadInput, match="takes settings, and no config was given"):
        load_job(f"{path}:taking")


def test_settings_reach_a_function_of_several_arguments_by_their_names(write: Write) -> None:
    path = write("""
        def build(batch_size=12, length=3, name="mine"):
            def batch(batch_size=batch_size, length=length):
                return torch.ones(batch_size, length, 4)
            return {"model": make_model, "batch": batch, "loss": loss, "optimizer": sgd, "name": name}
    """)
    settings = {"batch_size": 5, "length": 7, "loop": {"every": 2}}
    job, _ = load_job(f"{path}:build", settings=settings)
    assert (dict(job.sizes), job.name) == ({"batch_size": 5, "length": 7}, "mine")
    with pytest.raises(BadInput, match="by default, which is not a whole number"):
        load_job(f"{path}:build", settings={"rows": 5, "loop": {}})


def test_the_model_is_not_made_while_loading(write: Write) -> None:
    path = write("""
        def never():
            raise AssertionError('made')
        def build():
            return never, make_batch, loss
    """)
    job, _ = load_job(f"{path}:build")
    with pytest.raises(AssertionError, match="made"):
        job.make_model()


def test_sizes_are_replaced_by_name(write: Write) -> None:
    path = write("def build(): return make_model, make_batch, loss")
    job, _ = load_job(f"{path}:build", sizes={"length": 11})
    assert job.sizes == {"batch_size": 8, "length": 11}
    with pytest.raises(BadInput, match="has no width; its sizes are batch_size, length"):
        load_job(f"{path}:build", sizes={"width": 1})


def test_files_import_their_neighbours_and_modules_are_found_from_here(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_neighbour.py").write_text("WIDTH = 2\n")
    path = write("""
        from my_neighbour import WIDTH
        def build():
            return lambda: nn.Linear(4, WIDTH), make_batch, loss
    """)
    assert load_job(f"{path}:build")[0].make_model().out_features == 2
    monkeypatch.chdir(tmp_path)
    assert load_job("my_job:build")[0].make_model().out_features == 2


def test_a_dotted_attribute_is_followed(write: Write) -> None:
    path = write("""
        class Jobs:
            @staticmethod
            def build():
                return make_model, make_batch, loss
    """)
    assert load_job(f"{path}:Jobs.build")[0].sizes["batch_size"] == 8


def test_a_config_folder_is_a_name(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the dev extra brings transformers")
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    job, recipe = load_job(
        str(tmp_path), task="masked-lm", sizes={"batch_size": 2, "length": 16}, padded=False
    )
    assert (job.name, recipe) == ("bert masked-lm", Recipe())
    assert job.make_batch(**job.sizes)["attention_mask"].all()


def test_a_lightning_module_is_a_name(write: Write) -> None:
    path = write("""
        class Mine(nn.Module):
            def __init__(self, width=4):
                super().__init__()
                self.layer = nn.Linear(width, 1)
            def training_step(self, batch, batch_idx):
                return self.layer(batch).mean()
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)
    """)
    job, recipe = load_job(f"{path}:Mine", make_batch=f"{path}:make_batch")
    assert job.sizes == {"batch_size": 8, "length": 3}
    assert type(stepped(job, recipe).optimizer) is torch.optim.SGD


# What goes wrong


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "'nowhere' does not name a model"),
        ("nowhere:", "does not name a model"),
        ("my_no_such_package.models:build", "there is no module 'my_no_such_package'"),
        ("json.my_no_such_module:build", "there is no module 'json.my_no_such_module'"),
        ("my_nowhere.py:build", "my_nowhere.py does not exist"),
        ("json:laods", r"json has no 'laods' \(did you mean json:loads\)"),
        ("json:xyzzy", "json has no 'xyzzy'$"),
        ("json:__name__", "json:__name__ is str, not a function"),
        ("torch.nn:Linear", "not a LightningModule"),
    ],
)
def test_a_name_with_nothing_behind_it_says_what_is_missing(name: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        load_job(name)


def test_a_build_that_raises_keeps_its_own_words_and_line(write: Write) -> None:
    path = write("def build():\n    raise ValueError('depth must be even, got 3')\n")
    with pytest.raises(BadInput) as caught:
        load_job(f"{path}:build")
    assert caught.value.message == f"{path}:build raised ValueError: depth must be even, got 3"
    assert caught.value.hint is not None and caught.value.hint.startswith(f"at {path}:")


def test_a_file_that_raises_or_lacks_a_package_is_one_line(write: Write) -> None:
    with pytest.raises(BadInput, match=r"importing my_job.py raised ZeroDivisionError: division by zero"):
        load_job(f"{write('1 / 0')}:build")
    with pytest.raises(BadInput, match="raised ModuleNotFoundError: No module named 'my_missing'"):
        load_job(f"{write('import my_missing')}:build")


@pytest.mark.parametrize("package", ["transformers", "peft", "lightning"])
def test_a_file_that_needs_an_optional_package_names_it(
    package: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=f"needs the package '{package}'.*pip install {package}"):
        load_job(f"{write(f'import {package}')}:build")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("None", "returned None"),
        ("make_model()", "returned Linear"),
        ("(make_model,)", "returned 1 values"),
        ("{'model': make_model}", "returned no batch"),
        ("{'model': make_model, 'batch': make_batch, 'looss': loss}", "returned looss, none of"),
        ("(3, make_batch)", "returned a model of type int"),
        ("(make_model, make_batch, 0.5)", "returned a loss of type float"),
        ("(make_model, None)", "returned no batch"),
        ("(make_model, make_batch, loss, 'adam')", "the optimizer is str"),
        ("(make_model, lambda batch_size: None, loss)", "returned NoneType, which holds no tensor"),
        ("(make_model, lambda batch_size: 1 // 0, loss)", "the batch maker of .* raised ZeroDivisionError"),
        ("(make_model, lambda batch_size: torch.ones(batch_size, device='meta'), loss)", "tensors on meta"),
    ],
)
def test_an_answer_that_is_no_job_says_what_is_wrong_with_it(
    returned: str, message: str, write: Write
) -> None:
    with pytest.raises(BadInput, match=message):
        load_job(f"{write(f'def build(): return {returned}')}:build")


def test_a_build_of_two_arguments_is_refused(write: Write) -> None:
    with pytest.raises(BadInput, match="takes width, depth; a build function takes the settings, some"):
        load_job(f"{write('def build(width, depth): ...')}:build", settings={})


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_batch_maker_that_needs_a_gpu_is_told_so(write: Write) -> None:
    path = write("def build(): return make_model, lambda batch_size: torch.ones(batch_size).cuda(), loss")
    with pytest.raises(BadInput, match=r"the batch maker of .* needs a GPU") as caught:
        load_job(f"{path}:build")
    assert caught.value.hint is not None and f"{path}:" in caught.value.hint


def test_loading_touches_torch_only_when_it_has_to() -> None:
    """The names above are parsed by a module that the command line imports."""
    code = "import sys, flatout.memory.jobs.from_name; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
