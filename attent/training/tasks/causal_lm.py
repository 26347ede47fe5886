"""`--task lm`: predict the next token with a decoder-only model; each validation generates a greedy sample."""

import math
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from attent.data.encode import add_special_tokens
from attent.data.text_batches import WindowLoader
from attent.data.text_corpus import TextCorpus
from attent.data.token_store import EncodedTexts
from attent.decoding.generation.loop import generate_greedy
from attent.models import CausalConfig, CausalLM, presets
from attent.nn import RotaryConfig
from attent.nn.eval_mode import eval_mode
from attent.training.config import RunConfig, Size
from attent.training.events import ValidationSample
from attent.training.objective import CausalLMObjective
from attent.training.tasks import base, text_task

PROMPT_TOKENS, SAMPLE_TOKENS = 24, 64  # of the sample of a validation


class CausalLMTask(text_task.TextTask):
    text_layout = "documents"
    unit = "document"
    size_defaults = text_task.TaskDefaults(
        epochs_by_tokens=((0, 60), (5_000_000, 20), (50_000_000, 6), (500_000_000, 2)),
        finetune_epochs=3,
        min_steps=2_000,
        lr_by_size={"tiny": 2e-3, "small": 1e-3, "base": 6e-4, "big": 3e-4},
        finetune_lr_by_size={"tiny": 3e-4, "small": 2e-4, "base": 1e-4, "big": 5e-5},
        dropout_by_tokens=((0, 0.2), (20_000_000, 0.1), (500_000_000, 0.0)),
        batch_tokens_by_size={"tiny": 16_384, "small": 16_384, "base": 32_768, "big": 32_768},
        warmup_ratio=0.05,
    )
    default_settings: ClassVar[dict[str, Any]] = {"train": base.MODERN_RECIPE | {"betas": [0.9, 0.95]}}
    used_settings = frozenset({"data.tokenizer", "data.max_tokens"})
    model_class = CausalLM
    config_class = CausalConfig
    objective_class = CausalLMObjective

    @classmethod
    def placeholder_config(cls, vocab: int, requested: Mapping[str, Any]) -> CausalConfig:
        return causal_lm_config("tiny", vocab)

    def prepare_texts(self, texts: TextCorpus) -> EncodedTexts:
        """Documents end to end, each closed by the end token, also where the tokenizer adds none to a prompt."""
        framed = add_special_tokens(self.encode_texts(texts), self.vocabulary.prefix_ids, (self.vocabulary.end,))
        return EncodedTexts.from_sentences(framed, self.data_key)

    def build_config(self, size: Size) -> CausalConfig:
        vocabulary = self.vocabulary
        start = vocabulary.start if vocabulary.prefix_ids else None
        return replace(causal_lm_config(size, vocabulary.size), start_id=start, end_ids=(vocabulary.end,))

    def build_train_batches(self, run: RunConfig) -> base.BatchLoader:
        assert run.train.batch_tokens
        return WindowLoader(
            self.encoded_texts,
            batch_tokens=run.train.batch_tokens,
            window_size=min(self.max_tokens, run.train.batch_tokens),
            pad=self.vocabulary.pad,
            seed=run.train.seed,
        )

    def build_eval_batches(self, texts: TextCorpus) -> base.BatchLoader:
        return WindowLoader(
            self.prepare_texts(texts),
            batch_tokens=max(base.VALID_BATCH_TOKENS, self.max_tokens),
            window_size=self.max_tokens,
            pad=self.vocabulary.pad,
            fixed=True,
        )

    def evaluate(self, model: CausalLM, texts: TextCorpus) -> base.EvalResult:
        return base.EvalResult(samples=(self.generate_sample(model, texts),))

    def generate_sample(self, model: CausalLM, texts: TextCorpus) -> ValidationSample:
        prefix = self.vocabulary.prefix_ids
        ids = self.vocabulary.encode([texts.texts[0][: 40 * SAMPLE_TOKENS]])[0]
        positions = text_task.max_positions(model.config)
        room = PROMPT_TOKENS + SAMPLE_TOKENS if positions is None else positions - len(prefix)
        prompt = max(1, min(PROMPT_TOKENS, room // 2))
        count = max(1, min(SAMPLE_TOKENS, room - prompt))
        with eval_mode(model), torch.no_grad():
            generated = generate_greedy(model, [*prefix, *ids[:prompt]], count, model.config.end_ids)
        parts = (ids[:prompt], ids[prompt : prompt + count], list(generated.token_ids))
        source, reference, output = (self.vocabulary.decode(part) for part in parts)
        return ValidationSample(source=source, reference=reference, output=output)

    def score_texts(self, model: CausalLM, texts: TextCorpus, split: base.Split) -> base.FinalScores:
        total, num_targets = self.compute_loss(model, self.get_eval_batches(texts))
        scores, bits = self.build_scores(texts, split, total, num_targets), total / math.log(2)
        num_bytes = sum(len(text.encode(errors="replace")) for text in texts.texts)
        rates = {"character": bits / max(1, texts.char_count), "byte": bits / max(1, num_bytes)}
        columns = [(f"Bits per {unit}", f"{rate:.3f}") for unit, rate in rates.items()]
        return replace(
            scores,
            metrics={**scores.metrics, **{f"bits_per_{unit}": rate for unit, rate in rates.items()}},
            summary=f"{scores.summary}, {rates['character']:.3f} bits per character",
            extra_columns=(*scores.extra_columns, *columns),
            samples=(self.generate_sample(model, texts),),
        )

    def describe_model(self, out: Path) -> base.ModelDescription:
        folder = shlex.quote(str(out))
        return base.ModelDescription(
            title="A language model",
            shell_example=f'attent generate {folder} "Once upon a time"',
            python_example=base.build_python_example("Generator", out, '.generate(["Once"])[0][0].text'),
            next_step=f'try it: attent generate {folder} "Once"',
            loss_unit="token",
            note="Bits per character and byte do not depend on the tokenizer.",
            samples_title="Generated text",
            sample_labels=("Prompt", "Original", "Generated"),
        )


def causal_lm_config(size: Size, vocab: int) -> CausalConfig:
    """GPT-2 with rotary positions: they have no maximum length and learn faster."""
    return CausalConfig(
        vocab=vocab, stack=replace(presets.GPT2, positions=RotaryConfig(), **text_task.STACK_BY_SIZE[size])
    )
