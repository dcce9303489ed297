"""Train a model through the whole system: `python -m learn --vllm PYTHON`, as `make learn` calls it.

Finished runs are not repeated; an interrupted run resumes from its last checkpoint.
"""

import argparse
import itertools
import random
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from learn import report
from learn.demonstrations import demonstrations
from learn.plan import ModelPlan, Plan, load_plan
from learn.records import curve, read_records
from learn.system import Examination, Weights, family_of, opening, rollout_service
from learn.tasks import LearnTask, Split, tasks
from prorl_envs import InputError, Prompt, ProrlError
from prorl_envs.env.rows import rows as read_rows
from tests.support.vllm_server import VllmServer, vllm_server

HERE = Path(__file__).parent
console = Console(stderr=True)
type Records = list[dict[str, Any]]


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # servers stop with their blocks
    options = _options()
    try:
        plan = load_plan(options.plan)
        if options.model:
            plan = plan.model_copy(update={"model": ModelPlan(name=options.model)})
        chosen = {"steps": options.steps, "staleness": options.staleness}
        chosen |= {"dynamic": options.dynamic, "retokenise": options.retokenise}
        plan = plan.changed({key: value for key, value in chosen.items() if value})
        plans = [plan, *(plan.changed(other) for other in plan.ablations if options.ablations)]
        runs = Session(plans, options.out, options.seeds, vllm=options.vllm, server=options.server).run()
    except ProrlError as error:
        console.print(f"error: {error.message}", markup=False)
        if error.hint:
            console.print(f"hint: {error.hint}", markup=False)
        raise SystemExit(2) from None
    Console().print(report.table(runs))
    report.save_numbers(runs, options.out / "held_out.csv")
    report.draw(runs, options.out / "held_out.svg")
    report.save_steps(runs, options.out / "steps.csv")
    report.draw_steps(runs, options.out / "steps.svg")
    if plan.model.name is None and plan.train is None:
        from learn import diagnosis  # it loads torch

        models = diagnosis.models_of(options.out)
        Console().print(diagnosis.table(models, options.out / "tokenizer", family_of(plan)))
    console.print(f"{options.out} has the curves: held_out.svg and steps.svg, and .csv of both")


class Session:
    """All runs, one after the other, on one model server and one service.

    Args:
        plans: plans of the trained runs; the first also defines the model, the servers and the frozen runs.
        out: output folder.
        seeds: there is a trained run and a frozen one for each.
        vllm: Python of an environment that has vLLM for the CPU.
        server: URL of a running vLLM, used instead.
    """

    def __init__(
        self, plans: list[Plan], out: Path, seeds: list[int], *, vllm: Path | None, server: str | None = None
    ) -> None:
        self.plan = plans[0]
        self.plans = {plan.arm: plan for plan in plans}
        self.out = out
        self.seeds = seeds
        self.vllm = vllm
        self.server = server

    def run(self) -> dict[tuple[str, int], Records]:
        """Do the missing runs. Return the records of all runs, including other arms in the same folder.

        Raises:
            ProrlError: a server does not start, or the service ends a run.
        """
        wanted = [(arm, seed) for arm in (*self.plans, "frozen") for seed in self.seeds]
        missing = [(arm, seed) for arm, seed in wanted if not self._finished(arm, seed)]
        missing.sort(key=lambda run: run[1])  # an interrupted run has whole seeds
        if missing:
            self.out.mkdir(parents=True, exist_ok=True)
            start = self._start()
            with ExitStack() as stack:
                console.print("starting the model server and the rollout service ...")
                server = self._model_server(start, stack)
                service = stack.enter_context(
                    rollout_service(self.plan.service, server.url, start, self.out / "service.log")
                )
                for arm, seed in missing:
                    self._do(arm, seed, start, server, service)
        return found(self.out)

    def _model_server(self, model: str, stack: ExitStack) -> VllmServer:
        if self.server is not None:
            return VllmServer(self.server)
        if self.vllm is None:
            raise InputError("no model server", hint="--vllm PYTHON starts one, --server URL uses yours")
        return stack.enter_context(
            vllm_server(
                self.vllm,
                Path(model),
                self.out / "vllm.log",
                max_model_len=self.plan.max_model_len,
                max_num_seqs=self.plan.max_num_seqs,
            )
        )

    def _do(self, arm: str, seed: int, start: str, server: VllmServer, service: str) -> None:
        from learn.training import Run, control, train

        held_out, levels = self._rows("held_out", 0, self.plan.held_out_tasks)
        rows, _ = self._rows(
            "train", seed, self.plan.steps // self.plan.updates * self.plan.prompts + self.plan.prompts
        )
        folder = self._folder(arm, seed)
        run = Run(
            plan=self.plans.get(arm, self.plan),
            seed=seed,
            start=start,
            folder=folder,
            service=service,
            weights=Weights(server, folder / "weights"),
            examination=Examination(service, self.plan.environment, held_out, levels),
            rows=rows,
            reserve=(task.row for task in tasks("train", 1000 + seed)),
        )
        columns = (
            TextColumn(f"{arm} {seed}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        with Progress(*columns, console=console) as bar:
            shown = bar.add_task("", total=self.plan.steps)
            said = {"train": "", "held_out": ""}

            def progress(record: dict[str, Any]) -> None:
                said[record["kind"]] = f"{record['reward']:.2f}"
                about = f"reward {said['train'] or '-'}, held out {said['held_out'] or '-'}"
                bar.update(shown, completed=record["step"], description=about)

            (control if arm == "frozen" else train)(run, progress)

    def _start(self) -> str:
        """Return the initial model of all runs: a folder, or a name."""
        if self.plan.model.name is not None:
            return self.plan.model.name
        folder = self.out / "start"
        if not (folder / "model.safetensors").exists():
            prepare(self.plan, folder)
        return str(folder)

    def _rows(self, split: Split, seed: int, count: int) -> tuple[list[dict[str, Any]], list[int]]:
        """Return task rows, and the level of each."""
        given = self.plan.train if split == "train" else self.plan.held_out
        if given is not None:
            own = [row for _, row in read_rows(given)]
            chosen = list(itertools.islice(itertools.cycle(own), count)) if split == "train" else own[:count]
            return chosen, [1] * len(chosen)
        made = list(itertools.islice(tasks(split, seed), count))
        return [task.row for task in made], [task.level for task in made]

    def _folder(self, arm: str, seed: int) -> Path:
        return self.out / f"{arm}-{seed}"

    def _finished(self, arm: str, seed: int) -> bool:
        looks = curve(read_records(self._folder(arm, seed) / "records.jsonl"))
        return bool(looks) and looks[-1][0] == self.plan.steps


def found(out: Path) -> dict[tuple[str, int], Records]:
    """Return the records of all runs in a folder, trained ones first."""
    runs = {}
    for path in out.glob("*-*/records.jsonl"):
        arm, _, seed = path.parent.name.rpartition("-")
        runs[arm, int(seed)] = read_records(path)
    order = {"trained": 0, "frozen": 2}
    return dict(sorted(runs.items(), key=lambda run: (order.get(run[0][0], 1), run[0])))


def prepare(plan: Plan, folder: Path) -> None:
    """Make a small model, trained briefly by imitation."""
    import torch

    from learn import imitation
    from learn.drift import split

    torch.set_num_threads(plan.threads)
    family = family_of(plan)

    def prompts(task: LearnTask) -> Prompt:
        return opening(family, task.row)

    tokenizer = folder.with_name("tokenizer")
    renderer = imitation.make_tokenizer(tokenizer, prompts, plan.model.seed)
    model = imitation.make_model(plan.model, renderer)
    chance = random.Random(plan.model.seed)

    def tokenised(ids: list[int]) -> list[int]:
        return split(ids, renderer.tokenizer, plan.model.splits, chance)

    shown = [
        imitation.written(task, steps, prompts(task), renderer, tokenised)
        for task, steps in itertools.islice(
            demonstrations(tasks("train", plan.model.seed), plan.model.seed), plan.model.demonstrations
        )
    ]
    columns = (
        TextColumn("imitation"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as bar:
        total = len(shown) // plan.model.batch
        task = bar.add_task("", total=total)

        def progress(loss: float) -> None:
            bar.update(task, advance=1, description=f"loss {loss:.3f}")

        imitation.imitate(model, shown, plan.model, progress)
    imitation.untie(model)
    imitation.save(model, folder, tokenizer)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="learn", description=__doc__)
    parser.add_argument("--plan", type=Path, default=HERE / "tiny.yaml", help="what a run is")
    parser.add_argument("--out", type=Path, default=Path("runs/learn"), help="where the runs write")
    parser.add_argument("--vllm", type=Path, help="Python of an environment that has vLLM for the CPU")
    parser.add_argument("--server", help="URL of a vLLM in development mode that runs already, instead")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, help="instead of the plan's")
    parser.add_argument(
        "--dynamic", action="store_true", help="dynamic sampling: groups of equal rewards are replaced"
    )
    parser.add_argument(
        "--staleness", type=int, help="asynchronous: rollouts are so many steps ahead, and no more"
    )
    parser.add_argument(
        "--retokenise", action="store_true", help="drift on purpose: train on the text, tokenised again"
    )
    parser.add_argument(
        "--ablations", action="store_true", help="the plan's ablations too, beside what it is without them"
    )
    parser.add_argument("--model", help="Hub name or folder of a model to train, instead of a small one")
    return parser.parse_args()


if __name__ == "__main__":
    main()
