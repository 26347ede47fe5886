"""The table of training tasks. To add one, write a class (see `base.Task`) and add a line here.

Task modules are imported on first use: this module is part of `attent train --help`, which must not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from attent.training.tasks.base import Task

TaskName = Literal["translate", "lm", "mlm", "spans", "classify", "images", "speech", "caption"]
TASKS: dict[TaskName, tuple[str, str, str]] = {  # "module:class" in this package, help, help of its data
    "translate": (
        "translation:TranslationTask",
        "pairs of texts (the default)",
        "files, folders, built-in corpora, - for stdin, each with an optional weight (own.tmx:3)",
    ),
    "lm": ("language_modeling:CausalLMTask", "next token", ".txt or .jsonl documents"),
    "mlm": ("language_modeling:MaskedLMTask", "masked tokens", "one text per line"),
    "spans": ("language_modeling:SpanCorruptionTask", "masked spans", "one text per line"),
    "classify": ("text_classification:TextClassificationTask", "labels of texts", ".tsv of text and label"),
    "images": ("image_classification:ImageClassificationTask", "labels of images", "a folder per class, or idx files"),
    "speech": ("speech:SpeechTask", "recordings to text", ".tsv of recording and text, or a folder of both"),
    "caption": ("captioning:CaptioningTask", "texts of images", ".tsv of image, text and, if several, language"),
}
TASK_HELP = ", ".join(f"{name}: {text}" for name, (_, text, _) in TASKS.items())
DATA_HELP = "; ".join(f"{name}: {text}" for name, (_, _, text) in TASKS.items())


def get_task_class(name: TaskName) -> "type[Task]":
    module, _, class_name = TASKS[name][0].partition(":")
    return getattr(import_module(f"{__name__}.{module}"), class_name)
