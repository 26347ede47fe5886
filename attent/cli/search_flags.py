"""What `attent translate` and `attent score` share: the flags of a search and of the machine it runs on, and what they
become: a `Search`, a `Translator`, a language that the model knows. Torch is imported when there is work to do.
"""

# No `from __future__ import annotations`: a class of another module inherits these flags, and must know their types.

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

if TYPE_CHECKING:
    import torch

    from attent.decoding import SearchOptions, Translator
    from attent.text.tokenizer import Tokenizer

LengthPenaltyType = Literal["avg", "wu", "none"]
EngineName = Literal["torch", "ctranslate2"]
DtypeName = Literal["float32", "bfloat16", "float16"]
COMMON_GROUP, CONSTRAINT_GROUP, SEARCH_GROUP, SAMPLING_GROUP, OUTPUT_GROUP, DOCUMENT_GROUP, DEVICE_GROUP = (
    Group(name, sort_key=number)
    for number, name in enumerate(
        ("Most used", "Control", "Search", "Sampling", "Output", "Files of translators", "Machine"), 1
    )
)
DEVICE_TYPES = ("cuda", "mps", "xpu", "cpu")
DEFAULT_BEAM_SIZE = 4  # section 6.1 of the paper


class InputError(ValueError):
    """The text, the model or the language cannot be translated, in a sentence."""


@dataclass(frozen=True, kw_only=True)
class SearchFlags:
    """How to search; what is None is left to `Search`, or follows from the rest."""

    beam_size: Annotated[
        int | None,
        Parameter(
            name=["--beam-size", "--beam", "--num-beams"],
            group=COMMON_GROUP,
            help=f"hypotheses followed side by side, by default {DEFAULT_BEAM_SIZE}; 1: greedy",
        ),
    ] = None
    n_best: Annotated[
        int,
        Parameter(
            name=["--n-best", "--nbest", "--nbest-size", "--num-return-sequences"],
            group=COMMON_GROUP,
            help="how many translations of each line",
        ),
    ] = 1
    length_penalty: Annotated[
        float,
        Parameter(
            name=["--length-penalty", "--lenpen", "--normalize", "--alpha"],
            group=SEARCH_GROUP,
            help="alpha, by default 0.6; larger: longer translations",
        ),
    ] = 0.6
    length_penalty_type: Annotated[
        LengthPenaltyType,
        Parameter(
            group=SEARCH_GROUP,
            help="avg (default): score = log_prob / length^alpha, as fairseq, Hugging Face and CTranslate2 have it. "
            "wu: score = log_prob / ((5 + length) / 6)^alpha, the paper's. none: score = log_prob. The length is in "
            "tokens and counts the end",
        ),
    ] = "avg"
    max_length: Annotated[
        int | None,
        Parameter(
            name=["--max-length", "--max-decoding-length", "--max-new-tokens"],
            group=SEARCH_GROUP,
            help="tokens of a translation at most, by default those of its source + 50",
        ),
    ] = None
    min_length: Annotated[
        int, Parameter(name=["--min-length", "--min-decoding-length"], group=SEARCH_GROUP, help="tokens at least")
    ] = 0
    no_repeat_ngram_size: Annotated[
        int,
        Parameter(
            name=["--no-repeat-ngram-size", "--block-ngram-repeat"],
            group=SEARCH_GROUP,
            help="no sequence of so many tokens comes twice",
        ),
    ] = 0
    patience: Annotated[
        float | None,
        Parameter(
            group=SEARCH_GROUP, help="stop when beam size x patience have ended; by default when no better one can come"
        ),
    ] = None
    beam_groups: Annotated[
        int,
        Parameter(
            name=["--beam-groups", "--diverse-beam-groups", "--num-beam-groups"],
            group=SEARCH_GROUP,
            help="diverse beam search: groups of beams that avoid one another's tokens",
        ),
    ] = 1
    diversity_penalty: Annotated[
        float,
        Parameter(
            name=["--diversity-penalty", "--diverse-beam-strength", "--diversity-penalty"],
            group=SEARCH_GROUP,
            help="what a token costs for each earlier group that took it, by default 0.5",
        ),
    ] = 0.5
    sample: Annotated[
        bool, Parameter(group=SAMPLING_GROUP, negative="", help="draw by chance; any of the next four asks for it, too")
    ] = False
    temperature: Annotated[
        float | None, Parameter(group=SAMPLING_GROUP, help="below 1: nearer to the likeliest; above: bolder")
    ] = None
    top_k: Annotated[
        int | None,
        Parameter(
            name=["--top-k", "--sampling-topk", "--random-sampling-topk"],
            group=SAMPLING_GROUP,
            help="draw among this many likeliest tokens",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        Parameter(
            name=["--top-p", "--sampling-topp", "--random-sampling-topp"],
            group=SAMPLING_GROUP,
            help="draw among the fewest tokens that have this much probability together",
        ),
    ] = None
    seed: Annotated[int | None, Parameter(group=SAMPLING_GROUP, help="the same seed and text give the same draw")] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class DeviceFlags:
    """Where to search."""

    engine: Annotated[
        EngineName | None,
        Parameter(group=DEVICE_GROUP, help="by default ctranslate2 (int8) on a CPU for all that it can do, else torch"),
    ] = None
    device: Annotated[
        str | None, Parameter(group=DEVICE_GROUP, help="cuda, cuda:1, mps or cpu; by default the best there is")
    ] = None
    dtype: Annotated[
        DtypeName | None,
        Parameter(group=DEVICE_GROUP, help="of the torch engine: by default bfloat16 on an NVIDIA GPU, else float32"),
    ] = None
    threads: Annotated[
        int | None, Parameter(name=["--threads", "--cpu-threads"], group=DEVICE_GROUP, help="by default all cores")
    ] = None
    batch_tokens: Annotated[
        int | None, Parameter(group=DEVICE_GROUP, help="of the torch engine: source tokens x beams at once")
    ] = None


def build_search_options(flags: SearchFlags, min_beam_size: int = 1) -> "SearchOptions":
    """The search that the flags ask for; a beam that was not asked for is as wide as it must be, `least` or more."""
    from attent.decoding import SamplingOptions, SearchOptions

    drawn = {name: getattr(flags, name) for name in ("temperature", "top_k", "top_p", "seed")}
    drawn = {name: value for name, value in drawn.items() if value is not None}
    sampling = SamplingOptions(**drawn) if flags.sample or drawn else None
    wanted = max(DEFAULT_BEAM_SIZE, min_beam_size, 1 if sampling else flags.n_best)
    return SearchOptions(
        beam_size=_round_up(wanted, flags.beam_groups) if flags.beam_size is None else flags.beam_size,
        n_best=flags.n_best,
        length_penalty=flags.length_penalty,
        length_penalty_type=flags.length_penalty_type,
        max_length=flags.max_length,
        min_length=flags.min_length,
        no_repeat_ngram_size=flags.no_repeat_ngram_size,
        patience=flags.patience,
        beam_groups=flags.beam_groups,
        diversity_penalty=flags.diversity_penalty,
        sampling=sampling,
    )


def _round_up(value: int, multiple: int) -> int:
    return value if multiple < 1 else -(-value // multiple) * multiple


def use_flag_names(message: str) -> str:
    """A sentence about settings as one about flags: `beam_size` -> `--beam-size`."""
    names = "|".join(field.name for field in fields(SearchFlags))
    return re.sub(rf"(?<![\w-])({names})(?=`)|\b(max_length)\b", lambda name: f"--{name[0].replace('_', '-')}", message)


def load_translator(folders: Sequence[Path], flags: DeviceFlags, notify: Callable[[str], None] | None) -> "Translator":
    """The translator of these folders, on the machine as it was asked for, its engine ready."""
    for folder in folders:
        check_model_exists(folder)
    import torch

    from attent.decoding import Translator

    if flags.threads is not None:
        torch.set_num_threads(flags.threads)
    return Translator.load(
        *folders,
        device=resolve_device(flags.device),
        dtype=flags.dtype,
        engine=flags.engine,
        threads=flags.threads,
        batch_tokens=flags.batch_tokens,
        notify=notify,
    )


def resolve_dtype(flags: DeviceFlags) -> str:
    """The format of numbers that the model is loaded in."""
    from attent.decoding.translator import choose_device, choose_dtype

    if flags.dtype or flags.engine == "ctranslate2":  # which has formats of its own
        return flags.dtype or "float32"
    return choose_dtype(resolve_device(flags.device) or choose_device())


def check_model_exists(folder: Path) -> None:
    path = folder.expanduser()
    if (path / "run.toml").exists() and not (path / "config.json").exists():
        raise InputError(
            f"{folder}: holds a run without a model yet: its first validation writes one; "
            f"go on with: attent train --out {folder}"
        )


def resolve_device(name: str | None) -> "torch.device | None":
    """The device that was asked for, if it works; None: the best there is."""
    import torch

    if name in (None, "auto"):
        return None
    if name.partition(":")[0] not in DEVICE_TYPES:
        raise InputError(
            f"--device must be one of {', '.join(DEVICE_TYPES)}, but is `{name}`; leave it out for the best"
        )
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        found = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "only cpu"
        reason = str(error).splitlines()[0].rstrip(".")
        raise InputError(
            f"--device {name}: cannot be used here ({reason}); this machine has {found}; leave it out for the best"
        ) from error
    return device


def resolve_target_lang(to: str | None, known: tuple[str, ...], model: Path) -> str | None:
    """The tag to put before each source. "" means none: for a model that was trained further without tags."""
    names = ", ".join(known)
    if to is None and known:
        raise InputError(f"{model}: translates into several languages; name one with --to: {names}")
    if to and not known:
        raise InputError(f"{model}: has one language only, and --to must be left out, but is `{to}`")
    if to and to not in known:
        raise InputError(f"{model}: --to must be one of the model's languages, but is `{to}`; it has {names}")
    return to or None


def load_tokenizer(folder: Path) -> "Tokenizer":
    """Of the same save as the weights, where the folder can tell."""
    from attent.decoding import translator

    return translator.load_tokenizer(folder)
