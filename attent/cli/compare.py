"""`attent compare`: train several models on the same data at a matched budget, and write a report."""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from cyclopts import Group, Parameter

from attent.cli.train import GROUPS, DataFlag, SetFlag, add_config_flags, limit_thread_waiting
from attent.training.run_options import SETTING_TABLES, Arch, Size

OTHER_TABLES = ("data.images", "data.audio", "data.synthetic")  # whose settings a comparison has no flags for
COMPARISON = Group("What to compare", sort_key=-1)


def _list_flag(help_text: str) -> Parameter:
    return Parameter(group=COMPARISON, consume_multiple=True, negative_iterable="", help=help_text)


@add_config_flags({table: GROUPS[table] for path, table in SETTING_TABLES.items() if path not in OTHER_TABLES})
def compare(
    *,
    data: DataFlag = None,
    out: Annotated[Path, Parameter(group=COMPARISON, help="folder of runs and report; the same folder again resumes")],
    arch: Annotated[list[Arch] | None, _list_flag("architectures [default: all]")] = None,
    config: Annotated[list[Path] | None, _list_flag("comparison files or run files, instead of architectures")] = None,
    table3: Annotated[
        bool, Parameter(group=COMPARISON, negative="", help="the rows of the paper's table 3, instead of architectures")
    ] = False,
    budget: Annotated[
        Literal["params", "minutes", "flops"],
        Parameter(group=COMPARISON, help="same size and steps, same --minutes, or the FLOPs of the first entry"),
    ] = "params",
    seeds: Annotated[list[int] | None, _list_flag("a run for each of these random seeds [default: 1]")] = None,
    jobs: Annotated[int, Parameter(group=COMPARISON, help="runs that train at the same time")] = 1,
    size: Annotated[Size | None, Parameter(group=COMPARISON, help="model size [default: from the data]")] = None,
    set_: SetFlag = None,
    quiet: Annotated[bool, Parameter(group=COMPARISON, negative="", help="print only warnings and results")] = False,
    **flags: Any,
) -> int:
    """Train several models on the same data, and write a report; run the same command again to resume.

    attent compare --data multi30k --src en --tgt de --out compare
    attent compare --table3 --seeds 1 2 --data multi30k --src en --tgt de --out table3
    """
    if jobs < 1:
        raise ValueError(f"`--jobs` must be 1 or more, but is {jobs}")
    if sum(map(bool, (arch, config, table3))) > 1:
        raise ValueError("only one of --arch, --config and --table3 can be given; compare them in separate folders")
    limit_thread_waiting()
    from attent.training import comparison, comparison_report, run
    from attent.training import config as run_config
    from attent.training.progress import TrainingDisplay

    named = {"data.train": tuple(data or ()) or None, "size": size, **run.locate_settings(flags)}
    flat = {path: value for path, value in named.items() if value is not None}
    seed = flat.pop("train.seed", 1)
    requested = run_config.read_user_settings(None, flat, set_ or ())
    files = [comparison.TABLE3_FILE] if table3 else config or []
    architectures = [
        comparison.ComparisonEntry(name=name, label=name, settings={"arch": name}) for name in arch or get_args(Arch)
    ]
    entries, seeds = comparison.read_entries(files) or architectures, seeds or [seed]
    results = comparison.compare(
        entries,
        out,
        common=run_config.flatten_settings(requested),
        seeds=seeds,
        budget=budget,
        jobs=jobs,
        open_display=lambda: TrainingDisplay(quiet=quiet),
        notify=lambda text: print(text, file=sys.stderr),
    )
    comparison_report.write_report(results, out, "Table 3" if table3 else "Comparison", f"Budget: {budget}.")
    print(f"report: {out / comparison_report.REPORT_FILE}, {out / comparison_report.PAGE_FILE}")
    return int(sum(len(result.runs) for result in results) < len(entries) * len(seeds))
