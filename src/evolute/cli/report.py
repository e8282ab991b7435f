"""`evolute report`: a model, data, and a page on the curvature between them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from evolute.cli import places, quantities
from evolute.cli.checkpoint import TASKS, checkpoint
from evolute.cli.folder import check_output
from evolute.cli.json_output import STDOUT, JsonFile, emit, only_json
from evolute.cli.page import Page, check_drawable, was_stopped, write_page
from evolute.cli.refusal import refuse
from evolute.cli.subject import Options, Subject
from evolute.cli.subject_default import embedded
from evolute.cli.subject_own import own
from evolute.cli.theirs import perhaps_theirs
from evolute.zoo.trained import one_thread

MODEL, COST, OUTPUT = "Model and data", "How", "Output"


def report(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|HUB_ID",
            help="A Hugging Face checkpoint: a folder, or a name on the hub. (default: a small GPT, trained first)",
            rich_help_panel=MODEL,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|DIR|NAME",
            help="For language models a text file or a folder of *.txt; for classifiers a folder with a subfolder per "
            "class, or a .csv or .jsonl of texts and labels. (default: english, the prose that comes with Python)",
            rich_help_panel=MODEL,
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(TASKS)}. (default: what the checkpoint says)", rich_help_panel=MODEL),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            min=2, help="Tokens per window. (default: 128, or fewer if the model reads fewer)", rich_help_panel=MODEL
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="How many windows, texts or images. (default: 64; 128 sums)", rich_help_panel=MODEL),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="How many at once. (default: 8; 16 sums)", rich_help_panel=MODEL)
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run code that lies beside the weights.", rich_help_panel=MODEL),
    ] = False,
    own_model: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="MODULE:FUNCTION",
            help="Any model: a function that returns (model, batches, loss), a dict with these, or an ev.Objective.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    params: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN", help="Only these parameters or groups, as 'layers.*.attn'.", rich_help_panel=MODEL
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Stop measuring after 90s, 5min, …; also with memory, 5min/4GB.", rich_help_panel=COST
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="For what is kept between products: 512MB, 4GB, …", rich_help_panel=COST),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides everything that is random.", rich_help_panel=COST)] = 0,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:1. (default: cpu, or as --from has it)", rich_help_panel=COST)
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, float64 or bfloat16. (default: float32, or as --from has it)", rich_help_panel=COST
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the page goes.", rich_help_panel=OUTPUT)] = Path(
        "evolute-report"
    ),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a page that is there.", rich_help_panel=OUTPUT)
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Measure the curvature of a model on data, and write a page about it: report.html, report.json and the figures.

    How sharp is it, a minimum or a saddle, where is the curvature, what does the spectrum look like, and what follows.
    Without arguments it trains a small Transformer on digit addition and looks at that. Nothing is sent anywhere.

    [bold]evolute report[/bold]

    [bold]evolute report --model gpt2 --data notes.txt --samples 32 --budget 5min[/bold]

    [bold]evolute report --model ./my-vit --data ./photos --out vit-report[/bold]

    [bold]evolute report --from my_module:build --dtype float64 --json[/bold]

    Exit code: 0 if the page is written, 2 if it cannot be (one sentence says why), 130 after Ctrl-C, which keeps what
    is finished.
    """
    seconds, kept = _budget(budget, memory)
    options = Options(seed, kept, params, _device(device), _dtype(dtype), samples, batch_size)
    asked = Asked(model, data, task, length, trust_remote_code, own_model)
    asked.check(options)
    check_drawable()
    check_output(out, overwrite=overwrite)
    with only_json(json_file):
        page = _made(asked, options, seconds, out, progress=json_file != STDOUT)
    if emit(page.document(), json_file):
        print(page.text())
    raise typer.Exit(130 if was_stopped(page.analyses) else 0)


def _made(asked: Asked, options: Options, seconds: float | None, out: Path, *, progress: bool) -> Page:
    from evolute import report as pages

    subject = asked.subject(options, progress=progress)
    guard = perhaps_theirs(f"--from: code of '{subject.source}'") if subject.source else nullcontext()
    with guard, one_thread() if subject.small else nullcontext():
        analysis = pages.analyse(
            subject.objective,
            name=subject.name,
            about=subject.about,
            seed=options.seed,
            budget=seconds,
            training=subject.training,
            progress=progress,
        )
    return write_page([analysis], out, ("svg", "png"))


@dataclass(frozen=True)
class Asked:
    """Which subject was asked for: the embedded one, a checkpoint, or one of the user's own."""

    model: str | None
    data: str | None
    task: str | None
    length: int | None
    trusted: bool
    own: str | None

    def check(self, options: Options) -> None:
        """Options that contradict one another, or that would do nothing."""
        if self.task is not None and self.task not in TASKS:
            refuse(f"--task: expected {', '.join(TASKS)}, got {self.task!r}")
        if self.own is not None and self.model is not None:
            refuse("--from and --model both say which model to look at; give one of them")
        if self.model is None:
            for name in ("data", "task", "length", "trusted"):
                if getattr(self, name):
                    refuse(f"--{name.replace('trusted', 'trust-remote-code')} goes with --model, and there is none")
        if self.own is not None:
            for name in ("samples", "batch_size"):
                if getattr(options, name) is not None:
                    refuse(f"--{name.replace('_', '-')} does not go with --from, whose function makes the batches")

    def subject(self, options: Options, *, progress: bool) -> Subject:
        if self.own is not None:
            return own(self.own, options)
        if self.model is None:
            return embedded(options, progress=progress)
        return checkpoint(self.model, self.data, options, task=self.task, length=self.length, trusted=self.trusted)


def _budget(budget: str | None, memory: str | None) -> tuple[float | None, int | None]:
    seconds, kept = quantities.budget(budget) if budget is not None else (None, None)
    return seconds, quantities.size(memory) if memory is not None else kept


def _device(given: str | None) -> torch.device | None:
    return None if given is None else places.device(given)


def _dtype(given: str | None) -> torch.dtype | None:
    return None if given is None else places.dtype(given)
