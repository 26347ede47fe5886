"""BART, mBART, M2M-100 and NLLB as `transformers` stores them <-> our Seq2Seq.

fairseq's models: the layers have Marian's names. BART and mBART have learned positions and a norm on the embeddings,
M2M-100 and NLLB (its dense models) fairseq's sinusoids; all but BART are pre-norm with a norm after each stack.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from attent.interop import conversion, detect_family, hf_folder, marian
from attent.interop.conversion import ConfigKeys, OpenFolder, TensorLayout, TensorMapping
from attent.interop.hf_folder import Device, StrPath
from attent.models import Seq2Seq, Seq2SeqConfig, build_empty
from attent.models.pruning import restore_heads
from attent.nn import LearnedConfig, SinusoidalConfig
from attent.nn.positions import FAIRSEQ_START

FamilyName = Literal["bart", "mbart", "m2m_100"]
CLASS_NAMES = {"bart": "Bart", "mbart": "MBart", "m2m_100": "M2M100"}
PAD = 1
MAX_GENERATED = 200  # tokens at which generate() stops; without it, after 20
# A position table has rows that are never used in front, one for each number below the first position's.
SKIPPED_ROWS = TensorLayout(
    lambda theirs: [theirs[FAIRSEQ_START:]],
    lambda ours: torch.cat([ours[0].new_zeros(FAIRSEQ_START, ours[0].shape[1]), ours[0]]),
)
SINUSOID_TABLES = ("model.encoder.embed_positions.weights", "model.decoder.embed_positions.weights")  # in some files
TENSOR_MAPPINGS = [
    *marian.TENSOR_MAPPINGS,
    *conversion.read_mappings("bart"),
    TensorMapping(("encoder.positions.weight",), "model.encoder.embed_positions.weight", SKIPPED_ROWS),
    TensorMapping(("decoder.positions.weight",), "model.decoder.embed_positions.weight", SKIPPED_ROWS),
]


@dataclass(frozen=True, kw_only=True)
class BartKeys(marian.TranslatorKeys):
    model_type: FamilyName
    max_position_embeddings: int = 1024
    pad_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2


CONFIG_KEYS = ConfigKeys.read("bart", BartKeys)


def to_config(keys: BartKeys, *, share: bool, output_bias: bool, where: Path) -> Seq2SeqConfig:
    """`share` and `output_bias` are read from the tensors."""
    with conversion.explain_config_errors(where, CONFIG_KEYS.field_to_key):
        family_fields = get_family_fields(keys.model_type, keys.max_position_embeddings)
        fields = marian.build_shared_fields(keys, share, output_bias, where, **family_fields)
        start_id = conversion.get_start_id(keys.decoder_start_token_id, fields["end_id"], where)
        return Seq2SeqConfig(**fields, start_id=start_id)


def get_family_fields(family: str, max_length: int) -> dict[str, Any]:
    positions = SinusoidalConfig(order="fairseq") if family == "m2m_100" else LearnedConfig(max_length=max_length)
    return {
        "positions": positions,
        "norm_order": "post" if family == "bart" else "pre",
        "embedding_norm": family != "m2m_100",
    }


def load(folder: StrPath, *, dtype: torch.dtype | None = None, device: Device | None = None) -> Seq2Seq:
    opened = OpenFolder.open(
        folder, CONFIG_KEYS, ["encoder_layers", "decoder_layers"], prefix="model.", ignored_tensors=SINUSOID_TABLES
    )
    opened, share = marian.resolve_ties(opened, share=True)
    has_bias = marian.LOGITS_BIAS in opened.stored
    config = to_config(opened.keys, share=share, output_bias=has_bias, where=opened.config_path)
    return opened.load_into(build_empty(config), TENSOR_MAPPINGS, dtype, device)


def save(model: Seq2Seq, folder: StrPath, *, pad: int | None = None) -> None:
    """Write a folder of `transformers`. `pad` is by default 1 as in published models; pruned heads become zeros."""
    model, family = restore_heads(model), detect_family(model)
    config = model.config
    check_expressible(config, family)
    pad = conversion.choose_pad(pad, PAD, config.vocab)
    tokens = {"decoder_start_token_id": config.start_id, "eos_token_id": config.end_id, "pad_token_id": pad}
    hf_folder.write_folder(
        folder,
        config=to_hf_config(config, family) | tokens | {"dtype": conversion.get_dtype_name(model)},
        extra_files={hf_folder.GENERATION_FILE: tokens | {"num_beams": 5, "max_length": MAX_GENERATED}},
        tensors=marian.name_shared_embedding(conversion.export_tensors(model, TENSOR_MAPPINGS), config),
    )


def check_expressible(config: Seq2SeqConfig, family: str) -> None:
    name, positions = CLASS_NAMES[family], config.stacks[0].positions
    length = positions.max_length if isinstance(positions, LearnedConfig) else 0
    required = {key: (value,) for key, value in get_family_fields(family, length).items()}
    marian.check_translator(config, name, required)
    fields = {"target_vocab": None, "output_bias": False} if family == "m2m_100" else {"target_vocab": None}
    conversion.check_fields(config, name, fields)


def to_hf_config(config: Seq2SeqConfig, family: str) -> dict[str, Any]:
    positions = config.stacks[0].positions
    length = positions.max_length if isinstance(positions, LearnedConfig) else marian.MAX_POSITIONS
    return {
        "model_type": family,
        "architectures": [f"{CLASS_NAMES[family]}ForConditionalGeneration"],
        "is_encoder_decoder": True,
        "vocab_size": config.vocab,
        **marian.write_stacks(config),
        "max_position_embeddings": length,
        "scale_embedding": config.scale_embeddings,
        "tie_word_embeddings": config.tie_output,
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
    }
