"""The command line: what is analysed, what is written, and what is refused, in one sentence with exit code 2."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import evolute as ev
from checkpoints import PROSE, pictures, save
from evolute import cli
from evolute.cli import commands, info, quantities
from evolute.cli.bench import command as bench_command
from evolute.cli.checkpoint.subject import checkpoint
from evolute.cli.peers import PEERS
from evolute.cli.subject import Options, Subject

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported


def command(*arguments: object) -> int:
    """The exit code."""
    with pytest.raises(SystemExit) as left:
        cli.main([str(argument) for argument in arguments])
    assert isinstance(left.value.code, int)
    return left.value.code


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., str]:
    """Runs a command that has to be refused: exit code 2, one line on standard error, nothing written."""

    def run(*arguments: object) -> str:
        before = {file for file in tmp_path.rglob("*") if "__pycache__" not in str(file)}
        capsys.readouterr()
        code = command(*arguments)
        out, err = capsys.readouterr()
        assert code == 2, err
        assert out == "" and err.startswith("evolute: ") and err.count("\n") == 1 and err.endswith((".\n", "?\n")), err
        assert {file for file in tmp_path.rglob("*") if "__pycache__" not in str(file)} == before
        return err

    return run


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


# ---------------------------------------------------------------- a stand-in for the analysis, which has its own tests


@dataclass(frozen=True)
class Analysis:
    name: str
    about: Any
    seed: int
    budget: float | None
    training: Any
    notes: tuple[str, ...] = ()
    spectrum: Any = None
    blocks: Any = None
    products: int = 7

    @staticmethod
    def load(path: Path) -> "Analysis":
        file = path / "report.json" if path.is_dir() else path
        return Analysis(json.loads(file.read_text())["name"], {}, 0, None, None)


@dataclass
class Pages:
    """Records what it is asked."""

    objective: Any = None
    asked: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    formats: Sequence[str] = ()
    fail: Exception | None = None
    Analysis: Any = Analysis

    def analyse(self, objective: Any, *, progress: bool, **asked: Any) -> Analysis:
        self.objective, self.asked = objective, asked
        assert ev.Hessian(objective).shape[0] == objective.space.size and objective.value() > 0
        return Analysis(**asked, notes=self.notes)

    def write(self, analyses: Any, folder: Path, *, overwrite: bool, formats: Sequence[str]) -> Path:
        self.formats = formats
        (folder / "figures").mkdir()
        for name in formats:
            (folder / f"figures/a.{name}").write_text(name)
        if self.fail:
            raise self.fail
        (folder / "report.json").write_text(json.dumps({"name": analyses[0].name}))
        (folder / "report.html").write_text(", ".join(analysis.name for analysis in analyses))
        return folder / "report.html"

    def summary(self, analysis: Analysis) -> str:
        return f"{analysis.name} is curved."


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Pages:
    made = Pages()
    monkeypatch.setattr(ev, "report", made, raising=False)
    return made


@pytest.fixture
def quick_training(monkeypatch: pytest.MonkeyPatch) -> None:
    from evolute.cli import subject_default

    def trained(**options: Any) -> Any:
        return ev.zoo.trained_addition(width=16, heads=2, layers=1, steps=5, **options)

    monkeypatch.setattr(subject_default, "trained_addition", trained)


OWN = """
import torch
import evolute as ev

def chatty():
    print("chatter")
    return pieces()

def pieces():
    x = torch.randn(6, 3)
    return torch.nn.Linear(3, 2), [(x, torch.randn(6, 2))], torch.nn.MSELoss()

def objective():
    return ev.Objective(*pieces())

def as_dict():
    return dict(zip(("model", "batches", "loss"), pieces()))

def number(): return 3
def nothing(): pass
def two(): return pieces()[:2]
def odd(): return {"model": pieces()[0], "data": 3}
def not_a_model(): return "gpt2", [], torch.nn.MSELoss()
def unknown_loss(): return *pieces()[:2], abs
def needs(x): return pieces()
def broken():
    model, batches, loss = pieces()
    torch.nn.init.constant_(model.weight, float("nan"))
    return model, batches, loss
def no_data():
    return pieces()[0], [], torch.nn.MSELoss()
def no_pass():
    return pieces()[0], iter(pieces()[1]), torch.nn.MSELoss()
def raises(): raise RuntimeError("a bug\\nof theirs")
def deeper(): return raises()
def leaves(): raise SystemExit(3)
def endless(): return endless()
def unlike(): return torch.nn.Linear(4, 2), *pieces()[1:]
async def later(): return pieces()

class Refuses(torch.nn.Linear):
    calls, most = 0, 0
    def forward(self, x):
        self.calls += 1
        if self.calls > self.most:
            raise TypeError("no more")
        return super().forward(x)

def refuses(): return Refuses(3, 2), *pieces()[1:]
def tires():
    model, *rest = refuses()
    model.most = 1
    return model, *rest
def bad_loss():
    def criterion(output, batch): raise ValueError("labels are wrong")
    return *pieces()[:2], ev.Loss(lambda model, batch: model(batch[0]), criterion)

class Broken:
    def __iter__(self): raise OSError("no such disk")
def bad_batches(): return pieces()[0], Broken(), torch.nn.MSELoss()
value = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / f"mine_{tmp_path.name}.py".replace("-", "_")).write_text(OWN)
    return f"mine_{tmp_path.name}".replace("-", "_")


# ---------------------------------------------------------------- evolute report


@pytest.mark.usefixtures("quick_training")
def test_without_arguments_it_trains_and_writes_a_page(
    pages: Pages, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("report") == 0
    out, err = capsys.readouterr()
    assert (
        "A small GPT that adds is curved." in out and str(tmp_path / "evolute-report/report.html") in out and err == ""
    )
    written = {str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*") if f.is_file()}
    names = ("report.html", "report.json", "figures/a.svg", "figures/a.png")
    assert written == {f"evolute-report/{name}" for name in names}
    assert pages.asked["training"]["steps"] == 5 and pages.asked["seed"] == 0 and pages.asked["budget"] is None
    assert sum(len(x) for x, _ in pages.objective.batches.source) == 128


@pytest.mark.usefixtures("quick_training")
def test_options_of_the_embedded_default(pages: Pages) -> None:
    options = "--samples 20 --batch-size 8 --dtype float64 --seed 3 --budget 90s --memory 1GB --params layers.*.attn"
    assert command("report", *options.split()) == 0
    assert [len(x) for x, _ in pages.objective.batches.source] == [8, 8, 4]
    assert pages.objective.space.dtype == torch.float64 and pages.objective.memory == 10**9
    assert set(pages.objective.parameters) == {f"layers.0.attn.{name}.weight" for name in "qkvo"}
    assert pages.asked["seed"] == 3 and pages.asked["budget"] == 90


def test_budget_takes_time_and_memory() -> None:
    assert quantities.budget("5min/4GB") == (300, 4 * 10**9) and quantities.budget(" 4 gib ") == (None, 2**32)


@pytest.mark.parametrize("function", ["pieces", "objective", "as_dict"])
def test_a_model_of_ones_own(function: str, own: str, pages: Pages, tmp_path: Path) -> None:
    assert command("report", "--from", f"{own}:{function}", "--out", "there/deep") == 0
    assert (tmp_path / "there/deep/report.html").read_text() == "Linear"
    assert pages.objective.space.size == 8


def test_the_seed_decides_what_a_function_draws(own: str, pages: Pages) -> None:
    weights = list[torch.Tensor]()
    for seed in (1, 1, 2):
        assert command("report", "--from", f"{own}:pieces", "--seed", seed, "--overwrite") == 0
        weights.append(pages.objective.model.weight)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_a_file_with_a_function_and_another_dtype(own: str, pages: Pages) -> None:
    assert command("report", "--from", f"./{own}.py:pieces", "--dtype", "float64") == 0
    assert pages.objective.gradient().dtype == torch.float64


def test_json_is_all_there_is_on_standard_output(own: str, pages: Pages, capsys: pytest.CaptureFixture[str]) -> None:
    """What the user's function prints goes elsewhere."""
    assert command("report", "--from", f"{own}:chatty", "--json") == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert set(document) == {"evolute", "page", "files", "reports"} and "chatter" in err
    assert Path(document["page"]).is_file() and all(Path(file).is_file() for file in document["files"])
    (told,) = document["reports"]
    assert told["name"] == "Linear" and told["products"] == 7 and told["summary"] == "Linear is curved."


def test_json_to_a_file(own: str, pages: Pages, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("report", "--from", f"{own}:pieces", "--json", "all.json") == 0
    assert json.loads((tmp_path / "all.json").read_text())["evolute"] == ev.__version__
    assert "The page: " in capsys.readouterr().out


def test_stopped_in_the_analysis_what_is_finished_is_kept(own: str, pages: Pages, tmp_path: Path) -> None:
    pages.notes = ("The analysis was stopped during this measurement: the layers.",)
    assert command("report", "--from", f"{own}:pieces") == 130
    assert (tmp_path / "evolute-report/report.html").is_file()


def test_stopped_before_anything_is_finished(
    own: str, pages: Pages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pages, "analyse", stopped)
    assert command("report", "--from", f"{own}:pieces") == 130
    assert (
        capsys.readouterr().err.splitlines()[-1] == "evolute: stopped." and not (tmp_path / "evolute-report").exists()
    )


def test_a_bug_of_ours_keeps_its_traceback(own: str, pages: Pages) -> None:
    pages.fail = RuntimeError("a bug of ours")
    with pytest.raises(RuntimeError, match="a bug of ours"):
        cli.main(["report", "--from", f"{own}:pieces"])


# ---------------------------------------------------------------- where it is written


def test_what_is_there_is_kept(own: str, pages: Pages, tmp_path: Path, refused: Callable[..., str]) -> None:
    folder = tmp_path / "evolute-report"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    assert "--overwrite" in refused("report", "--from", f"{own}:pieces")
    assert pages.objective is None, "refused before the work"
    assert command("report", "--from", f"{own}:pieces", "--overwrite") == 0
    assert (folder / "notes.txt").read_text() == "mine" and (folder / "report.html").is_file()


def test_a_full_disk_leaves_nothing(own: str, pages: Pages, refused: Callable[..., str]) -> None:
    pages.fail = OSError(28, "No space left on device")
    assert "No space left on device" in refused("report", "--from", f"{own}:pieces")


def test_output_that_cannot_be(own: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "file").write_text("")
    source = f"{own}:pieces"
    assert "is a file" in refused("report", "--from", source, "--out", tmp_path / "file")
    assert "cannot write to" in refused("report", "--from", source, "--out", tmp_path / "file/deeper")
    assert "cannot write to" in refused("report", "--from", source, "--out", "/proc/evolute")
    assert "name too long" in refused("report", "--from", source, "--out", "x" * 300)
    assert "--json" in refused("report", "--from", source, "--json", "no/such/place.json")


def test_a_folder_without_permission(
    own: str, tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one who is not root meets it; root may write anywhere."""

    def closed(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("evolute.cli.folder.tempfile.TemporaryDirectory", closed)
    assert "Permission denied" in refused("report", "--from", f"{own}:pieces", "--out", tmp_path / "closed/page")


# ---------------------------------------------------------------- the analysis and the page as they are


def test_from_a_function_to_a_page_and_back(own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert command("report", "--from", f"{own}:pieces", "--json", "--budget", "20s") == 0
    document = json.loads(capsys.readouterr().out)
    (told,) = document["reports"]
    assert told["subject"]["parameters"] == 8 and told["sharpness"]["largest"]["values"][0] > 0
    assert told["spectrum"]["trace"]["value"] > 0 and "density" not in told["spectrum"] and told["products"] > 0
    assert {Path(file).name for file in document["files"]} >= {"report.html", "report.json"}
    assert command("plot", "evolute-report", "evolute-report/report.json", "--format", "svg") == 0
    assert (tmp_path / "evolute-plot/report.html").stat().st_size > 1000


def test_stopped_in_a_measurement(
    own: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("evolute.report.solvers.spectrum", stopped)
    assert command("report", "--from", f"{own}:pieces") == 130
    assert (tmp_path / "evolute-report/report.html").is_file() and capsys.readouterr().err == "evolute: stopped.\n"


def test_without_what_draws_the_page(own: str, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install matplotlib" in refused("report", "--from", f"{own}:pieces")


def test_plot_refuses_what_is_no_report(tmp_path: Path, refused: Callable[..., str]) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "other.json").write_text("[1, 2]")
    assert "other.json" in refused("plot", "other.json")


# ---------------------------------------------------------------- what --from refuses


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("number", "returned int; expected (model, batches, loss)"),
        ("nothing", "returned nothing"),
        ("two", "a tuple of 2"),
        ("odd", "a dict with 'model', 'data'"),
        ("not_a_model", "expected a torch.nn.Module"),
        ("unknown_loss", "expected a Loss or one of"),
        ("needs", "takes arguments"),
        ("later", "is async"),
        ("no_pass", "can be iterated again"),
        ("broken", "not finite: 6 of 6 in 'weight'"),
        ("no_data", "expected at least one batch"),
        ("value", "is no function but int"),
        ("peices", "did you mean 'pieces'?"),
    ],
)
@pytest.mark.usefixtures("pages")
def test_functions_that_do_not_fit(function: str, told: str, own: str, refused: Callable[..., str]) -> None:
    assert told in refused("report", "--from", f"{own}:{function}")


@pytest.mark.parametrize(
    ("function", "told", "line"),
    [
        ("raises", "raised RuntimeError: a bug of theirs", "def raises()"),
        ("deeper", "raised RuntimeError: a bug of theirs", "def raises()"),
        ("leaves", "raised SystemExit: 3", "def leaves()"),
        ("endless", "raised RecursionError: maximum recursion", "def endless()"),
        ("refuses", "raised TypeError: no more", 'raise TypeError("no more")'),
        ("tires", "code of 'mine:tires' raised TypeError: no more", 'raise TypeError("no more")'),
        ("bad_loss", "raised ValueError: labels are wrong", "def criterion"),
        ("bad_batches", "raised OSError: no such disk", "def __iter__"),
    ],
)
@pytest.mark.usefixtures("pages")
def test_what_raises_is_told_with_its_line(
    function: str, told: str, line: str, own: str, refused: Callable[..., str]
) -> None:
    number = next(place for place, text in enumerate(OWN.splitlines(), 1) if line in text)
    message = refused("report", "--from", f"{own}:{function}").replace(own, "mine")
    assert told in message and f"(mine.py, line {number}" in message


@pytest.mark.usefixtures("pages")
def test_what_raises_in_torch_is_told_too(own: str, refused: Callable[..., str]) -> None:
    message = refused("report", "--from", f"{own}:unlike")
    assert "mat1 and mat2 shapes cannot be multiplied (6x3 and 4x2) (torch/nn/modules/linear.py, line " in message


@pytest.mark.parametrize("place", ["there", "./there.py"])
@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("import no_such_package", "raised ModuleNotFoundError: No module named 'no_such_package' (there.py, line 1)"),
        ("x = 1\ndef build(:", "raised SyntaxError: invalid syntax (there.py, line 2)"),
        ("1 / 0", "raised ZeroDivisionError: division by zero (there.py, line 1)"),
        ("exit(4)", "raised SystemExit: 4"),
    ],
)
def test_modules_that_cannot_be_imported(
    place: str,
    content: str,
    told: str,
    tmp_path: Path,
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "there.py").write_text(content)
    monkeypatch.delitem(sys.modules, "there", raising=False)
    assert f"importing '{place}' {told}" in refused("report", "--from", f"{place}:build")


def test_a_traceback_on_request(
    own: str, pages: Pages, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EVOLUTE_TRACEBACK", "1")
    assert command("report", "--from", f"{own}:deeper") == 2
    err = capsys.readouterr().err
    assert "in raises" in err and err.splitlines()[-1].startswith("evolute: --from: ")


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("nowhere_at_all:build", "no module 'nowhere_at_all'"),
        (".mine:build", "got the module '.mine'"),
        ("../mine:build", "got the module '../mine'"),
        ("os.nowhere:build", "no module 'os.nowhere'"),
        ("nowhere.py:build", "no file 'nowhere.py'"),
        ("build", "expected my_module:build"),
        ("mine:", "expected my_module:build"),
    ],
)
def test_modules_that_are_not_there(spec: str, told: str, refused: Callable[..., str]) -> None:
    assert told in refused("report", "--from", spec)


def test_an_objective_has_its_own_settings(own: str, refused: Callable[..., str]) -> None:
    assert "made already" in refused("report", "--from", f"{own}:objective", "--dtype", "float64")
    assert "nothing matches" in refused("report", "--from", f"{own}:pieces", "--params", "layers.*")


# ---------------------------------------------------------------- flags


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("report --speed", "No such option: --speed"),
        ("report --budget soon", "--budget: expected a time such as 90s"),
        ("report --budget 0s", "--budget"),
        ("report --budget -3", "--budget"),
        ("report --memory 4", "--memory: expected a size"),
        ("report --dtype float8", "--dtype: expected float32, float64 or bfloat16, got 'float8'"),
        ("report --device tpu", "--device: expected cpu, cuda or cuda:1"),
        ("report --device cuda:x", "--device"),
        ("report --device cuda:99", "--device: PyTorch sees"),
        ("report --seed x", "'--seed'"),
        ("report --samples 0", "'--samples'"),
        ("report --length 1", "'--length'"),
        ("report --data notes.txt", "--data goes with --model"),
        ("report --task causal-lm", "--task goes with --model"),
        ("report --trust-remote-code", "--trust-remote-code goes with --model"),
        ("report --model a --task sorting", "--task: expected causal-lm"),
        ("report --model a --from b:c", "give one of them"),
        ("report --from b:c --samples 3", "--samples does not go with --from"),
        ("report --model ./nowhere", "there is no folder './nowhere'"),
        ("report --model a/b/c", "there is no folder"),
        ("report more", "unexpected extra argument"),
        ("plot", "REPORT"),
        ("plot nowhere.json", "there is no 'nowhere.json'"),
        ("plot nowhere.json --format gif", "--format: expected some of svg, png, pdf"),
        ("info --speed", "No such option"),
        ("bench --json no/such/x.json", "--json"),
        ("unfold", "No such command 'unfold'"),
    ],
)
def test_nonsense(arguments: str, told: str, refused: Callable[..., str]) -> None:
    assert told in refused(*arguments.split())


# ---------------------------------------------------------------- checkpoints


def subject(model: Path, data: object = None, **changes: Any) -> Subject:
    settings: dict[str, Any] = {"task": None, "length": None, "trusted": False} | changes
    options = {key: settings.pop(key) for key in list(settings) if key in Options.__dataclass_fields__}
    return checkpoint(str(model), None if data is None else str(data), Options(**options), **settings)


@pytest.fixture
def prose(tmp_path: Path) -> Path:
    (tmp_path / "prose.txt").write_text(PROSE)
    return tmp_path / "prose.txt"


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_a_language_model_on_text(name: str, tmp_path: Path, prose: Path, pages: Pages) -> None:
    folder = save(tmp_path / "model", name)
    assert command("report", "--model", folder, "--data", prose, "--samples", 5, "--batch-size", 2) == 0
    batches = pages.objective.batches.source
    assert [tuple(batch["input_ids"].shape) for batch in batches] == [(2, 16), (2, 16), (1, 16)]
    assert all(torch.equal(batch["input_ids"], batch["labels"]) for batch in batches)
    assert pages.asked["name"] == "model" and pages.asked["about"]["data"] == "prose.txt: 5 windows of 16 tokens"


def test_windows_follow_one_another_and_are_cut_to_the_context(tmp_path: Path, prose: Path) -> None:
    from checkpoints import tokenizer

    batches = subject(save(tmp_path / "m", "GPT2LMHeadModel"), prose).objective.batches.source
    rows = torch.cat([batch["input_ids"] for batch in batches])
    tokens = torch.tensor(tokenizer().encode(PROSE, add_special_tokens=False))
    assert rows.shape[1] == 16 and torch.equal(rows.flatten(), tokens[: rows.numel()])


def test_a_short_text_is_one_window(tmp_path: Path) -> None:
    (tmp_path / "short.md").write_text("the lazy dog")
    batches = subject(save(tmp_path / "m", "GPT2LMHeadModel"), tmp_path / "short.md").objective.batches.source
    assert [tuple(batch["input_ids"].shape) for batch in batches] == [(1, 3)]


def test_text_without_a_file_is_the_embedded_one(tmp_path: Path) -> None:
    made = subject(save(tmp_path / "m", "GPT2LMHeadModel"), samples=2, length=8)
    assert made.about["data"] == "english: 2 windows of 8 tokens"


@pytest.mark.parametrize(("name", "length"), [("BertForMaskedLM", 16), ("RobertaForMaskedLM", 11)])
def test_a_masked_language_model_has_fixed_masks(name: str, length: int, tmp_path: Path, prose: Path) -> None:
    folder = save(tmp_path / "m", name)
    first, again, other = (subject(folder, prose, seed=seed).objective.batches.source for seed in (1, 1, 2))
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a["input_ids"], b["input_ids"]) and torch.equal(a["labels"], b["labels"])
    assert not all(torch.equal(a["labels"], b["labels"]) for a, b in zip(first, other, strict=True))
    x, y = first[0]["input_ids"], first[0]["labels"]
    assert x.shape[1] == length and (x[:, 0] == 2).all() and (x[:, -1] == 3).all(), "[CLS] … [SEP]"
    assert torch.equal(x == 4, y != -100) and ((y != -100).sum(1) >= 1).all()


def test_texts_with_classes(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", "BertForSequenceClassification")
    rows = [("the cat runs", "cat"), ("the lazy dog jumps over the red fox", "dog"), ("slow", "dog")]
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t, "label": k}) + "\n" for t, k in rows))
    for i, (text, label) in enumerate(rows):
        (tmp_path / "a" / label).mkdir(parents=True, exist_ok=True)
        (tmp_path / "a" / label / f"{i}.txt").write_text(text)
    for data in ("a.csv", "a.jsonl", "a"):
        made = subject(folder, tmp_path / data).objective
        (batch,) = made.batches.source
        assert sorted(batch["labels"].tolist()) == [0, 1, 1] and batch["attention_mask"].sum(1).tolist() != [10] * 3
        assert made.value() > 0


def test_images_with_classes(tmp_path: Path, pages: Pages) -> None:
    folder, data = save(tmp_path / "m", "ViTForImageClassification"), pictures(tmp_path / "p", "cat", "dog")
    assert command("report", "--model", folder, "--data", data, "--batch-size", 4, "--dtype", "float64") == 0
    batches = pages.objective.batches.source
    assert [tuple(batch["pixel_values"].shape) for batch in batches] == [(4, 3, 8, 8), (2, 3, 8, 8)]
    assert sorted(torch.cat([batch["labels"] for batch in batches]).tolist()) == [0, 0, 0, 1, 1, 1]
    assert pages.objective.space.dtype == batches[0]["pixel_values"].dtype == torch.float64


def test_bfloat16(tmp_path: Path, prose: Path, pages: Pages) -> None:
    folder = save(tmp_path / "m", "LlamaForCausalLM")
    assert command("report", "--model", folder, "--data", prose, "--dtype", "bfloat16") == 0
    assert next(iter(pages.objective.parameters.values())).dtype == torch.bfloat16


# ---------------------------------------------------------------- checkpoints that are refused


def change(folder: Path, **settings: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    return folder


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"n_layer": 3}, "needs 'transformer.h.2.attn.c_attn.bias' (and 11 more), which the checkpoint does not have"),
        ({"n_layer": 1}, "which has no place for 'transformer.h.1.attn.c_attn.weight'"),
        ({"n_embd": 16}, "do not fit its config: 'transformer.h.0.attn.c_attn.bias' is (24,) in the checkpoint"),
        ({"vocab_size": 9}, "do not fit its config: 'transformer.wte.weight'"),
        ({"model_type": "telepathy"}, "the config of"),
        ({"architectures": ["GPT2Model"]}, "was saved as GPT2Model; choose one of causal-lm"),
        ({"architectures": None}, "does not say what it was made for"),
    ],
)
def test_configs_that_do_not_fit(
    settings: dict[str, Any], told: str, tmp_path: Path, prose: Path, refused: Callable[..., str]
) -> None:
    folder = change(save(tmp_path / "m", "GPT2LMHeadModel"), **settings)
    assert told in refused("report", "--model", folder, "--data", prose)


def test_a_model_without_its_head(tmp_path: Path, prose: Path, refused: Callable[..., str]) -> None:
    folder = save(tmp_path / "m", "BertModel")
    assert "BertForMaskedLM needs 'cls." in refused("report", "--model", folder, "--data", prose, "--task", "masked-lm")


def test_folders_that_are_no_checkpoints(tmp_path: Path, prose: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refused("report", "--model", tmp_path / "empty")
    assert "is a file" in refused("report", "--model", prose)
    assert "nor to be had from the hub" in refused("report", "--model", "nobody/nothing")
    folder = save(tmp_path / "m", "GPT2LMHeadModel")
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    assert "the weights of" in refused("report", "--model", folder, "--data", prose)
    (folder / "model.safetensors").unlink()
    assert "the weights of" in refused("report", "--model", folder, "--data", prose)
    (folder / "config.json").write_text("{")
    assert "the config of" in refused("report", "--model", folder, "--data", prose)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM"])
def test_no_tokenizer_is_made_up(name: str, tmp_path: Path, prose: Path, refused: Callable[..., str]) -> None:
    folder = save(tmp_path / "m", name, words=False)
    assert "tokenizer" in refused("report", "--model", folder, "--data", prose)


def test_a_tokenizer_of_another_model(tmp_path: Path, prose: Path, refused: Callable[..., str]) -> None:
    folder = save(tmp_path / "m", "GPT2LMHeadModel", vocab_size=9)
    assert "and the model 9; they do not fit" in refused("report", "--model", folder, "--data", prose)


def test_weights_that_are_not_finite(tmp_path: Path, prose: Path, refused: Callable[..., str]) -> None:
    from safetensors.torch import load_file, save_file

    folder = save(tmp_path / "m", "GPT2LMHeadModel")
    weights = load_file(folder / "model.safetensors")
    weights["transformer.ln_f.bias"][2] = float("inf")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert "not finite: 1 of 8 in 'transformer.ln_f.bias'" in refused("report", "--model", folder, "--data", prose)


def test_code_of_the_checkpoint_is_not_run(tmp_path: Path, prose: Path, refused: Callable[..., str]) -> None:
    folder = change(
        save(tmp_path / "m", "GPT2LMHeadModel"),
        model_type="strange",
        auto_map={"AutoConfig": "strange.Strange", "AutoModelForCausalLM": "strange.Strange"},
    )
    (folder / "strange.py").write_text("open('ran', 'w')")
    assert "only with --trust-remote-code" in refused("report", "--model", folder, "--data", prose)
    assert not Path("ran").exists()


STRANGE = """
from transformers import GPT2Config, GPT2LMHeadModel

class StrangeConfig(GPT2Config):
    model_type = "strange"

class StrangeForCausalLM(GPT2LMHeadModel):
    config_class = StrangeConfig
"""


def test_code_of_the_checkpoint_is_run_where_it_is_trusted(
    tmp_path: Path, prose: Path, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = change(
        save(tmp_path / "m", "GPT2LMHeadModel"),
        model_type="strange",
        architectures=["StrangeForCausalLM"],
        auto_map={"AutoConfig": "strange.StrangeConfig", "AutoModelForCausalLM": "strange.StrangeForCausalLM"},
    )
    (folder / "strange.py").write_text(STRANGE)
    assert command("report", "--model", folder, "--data", prose, "--trust-remote-code") == 0
    assert type(pages.objective.model).__name__ == "StrangeForCausalLM"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "no text in it"),
        (b" \n ", "no text in it"),
        (b"\xff\xfe\x00", "is not text in UTF-8: byte 0"),
        (b"a\0b", "zero bytes"),
        (b"dog", "has 1 tokens"),
    ],
)
def test_texts_that_cannot_be_used(content: bytes, told: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    folder, file = save(tmp_path / "m", "GPT2LMHeadModel"), tmp_path / "text.txt"
    file.write_bytes(content)
    assert told in refused("report", "--model", folder, "--data", file)


def test_data_that_does_not_suit_the_model(tmp_path: Path, prose: Path, refused: Callable[..., str]) -> None:
    gpt, vit = save(tmp_path / "gpt", "GPT2LMHeadModel"), save(tmp_path / "vit", "ViTForImageClassification")
    bert = save(tmp_path / "bert", "BertForSequenceClassification")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    odd, broken = pictures(tmp_path / "odd", "cat", "horse"), pictures(tmp_path / "broken", "cat")
    (broken / "cat" / "0.png").write_bytes(b"no picture")
    assert "--length 17 is more than the 16 tokens" in refused("report", "--model", gpt, "--length", 17)
    assert "there is no 'nowhere'" in refused("report", "--model", gpt, "--data", "nowhere")
    assert "no text in it" in refused("report", "--model", gpt, "--data", tmp_path / "empty")
    assert "--data is needed" in refused("report", "--model", vit)
    assert "no pictures in classes" in refused("report", "--model", vit, "--data", prose)
    assert "--length is for text" in refused("report", "--model", vit, "--data", odd, "--length", 8)
    assert "does not know the class 'horse'" in refused("report", "--model", vit, "--data", odd)
    assert "not a picture" in refused("report", "--model", vit, "--data", broken)
    assert "has no classes" in refused("report", "--model", bert, "--data", prose)
    assert "every row needs a text and a label" in refused("report", "--model", bert, "--data", tmp_path / "bad.csv")


# ---------------------------------------------------------------- plot, info, bench


def test_plot_draws_saved_reports_again(pages: Pages, tmp_path: Path, refused: Callable[..., str]) -> None:
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(json.dumps({"name": name}))
    assert command("plot", "before/report.json", "after", "--out", "both", "--format", "pdf,svg") == 0
    assert (tmp_path / "both/report.html").read_text() == "before, after" and pages.formats == ("pdf", "svg")
    assert "--overwrite" in refused("plot", "before", "--out", "both")
    assert command("plot", "before", "--out", "both", "--overwrite") == 0
    assert json.loads((tmp_path / "both/report.json").read_text()) == {"name": "before"}


def test_info_as_text_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("info") == 0
    out = capsys.readouterr().out
    assert ev.__version__ in out and torch.__version__ in out and "extra [hf]" in out and "GB free of" in out
    assert command("info", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {
        *("evolute", "python", "platform", "torch", "cuda", "devices", "threads", "cores", "memory", "extras", "peers")
    }
    assert set(found["extras"]["hf"]["packages"]) == {"transformers", "peft", "accelerate"}
    assert {peer.module for peer in PEERS} == set(found["peers"])


def test_info_says_how_to_get_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(info, "_version", lambda package: None if package == "peft" else "1.0")
    assert command("info") == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "extra [hf]" in line)
    assert "without peft: pip install" in line and "[hf]'" in line


def test_bench_compares_what_is_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_command, "SIZES", {True: (8, 1, 4)})
    monkeypatch.setitem(bench_command.LIBRARIES, "broken", lambda problem: problem.no_such_thing)
    assert command("bench", "--quick") == 0
    out = capsys.readouterr().out
    missing = [peer for peer in PEERS if peer.version is None]
    assert "evolute" in out and "AttributeError" in out
    assert all(f"Not installed: {peer.module}. {peer.install}" in out for peer in missing)
    assert command("bench", "--quick", "--json") == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert row["library"] == "evolute" and row["hessian"] > 0 and row["top_value"] > 0


# ---------------------------------------------------------------- help


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_help_teaches(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(name, "--help") == 0
    out = capsys.readouterr().out
    assert out.count(f"evolute {name}") >= 2, "the usage, and an example"
    assert "Exit code" in out or name == "info"


def test_help_names_every_option_of_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("report", "--help") == 0
    out = capsys.readouterr().out
    named = "model data task length samples batch-size trust-remote-code from params budget memory seed device dtype"
    assert all(f"--{name}" in out for name in [*named.split(), "out", "overwrite", "json"])


@pytest.mark.skipif(sys.platform == "win32", reason="no such signal")
def test_ctrl_c_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import pathlib, time\ndef build(): pathlib.Path('on').touch(); time.sleep(60)\n")
    arguments = [sys.executable, "-m", "evolute", "report", "--from", "slow:build"]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs are deaf to it
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, preexec_fn=heard) as running:
        while not (tmp_path / "on").exists() and running.poll() is None:
            time.sleep(0.1)
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=60)
    assert running.returncode == 130 and err == "evolute: stopped.\n" and not (tmp_path / "evolute-report").exists()


def test_the_console_script() -> None:
    script = Path(sys.executable).with_name("evolute")
    done = subprocess.run([script, "report", "--dtype", "float8"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1


def test_a_study_leaves_what_is_not_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, said in (("{}", "is no result of a study"), ('{"study": "sinks"}', "is of the study 'sinks'")):
        (tmp_path / "result.json").write_text(text)
        assert command("study", "growth", "--out", tmp_path) == 2
        assert said in " ".join(capsys.readouterr().err.split())
        assert (tmp_path / "result.json").read_text() == text and not (tmp_path / "cells").exists()
