"""Marian (opus-mt and its kin) as `transformers` stores it <-> our Seq2Seq.

The paper's model: post-norm, sinusoidal positions (sines first, then cosines), and a bias on the logits.
Every key of a config.json is mapped (`Facts`), must have the one value that we compute (`FIXED`), or is known
not to change what the model computes (`HARMLESS`); any other key is refused by name, and so is any tensor
that has no place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from attent import settings
from attent.interop import files
from attent.models import Seq2Seq, Seq2SeqConfig, build_empty
from attent.models.folder import FolderError, check_tensors
from attent.models.heads import unpruned
from attent.models.store import fill, tensors_of
from attent.nn import SinusoidalConfig, StackConfig, sinusoid
from attent.nn.checks import LARGEST
from attent.nn.feedforward import Activation

# --- names ----------------------------------------------------------------------------------------

MODULES = [  # ours, theirs; each is a weight and a bias
    ("encoder.blocks.{i}.own.query", "model.encoder.layers.{i}.self_attn.q_proj"),
    ("encoder.blocks.{i}.own.key", "model.encoder.layers.{i}.self_attn.k_proj"),
    ("encoder.blocks.{i}.own.value", "model.encoder.layers.{i}.self_attn.v_proj"),
    ("encoder.blocks.{i}.own.output", "model.encoder.layers.{i}.self_attn.out_proj"),
    ("encoder.blocks.{i}.own_residual.norm", "model.encoder.layers.{i}.self_attn_layer_norm"),
    ("encoder.blocks.{i}.feedforward.expand", "model.encoder.layers.{i}.fc1"),
    ("encoder.blocks.{i}.feedforward.contract", "model.encoder.layers.{i}.fc2"),
    ("encoder.blocks.{i}.feedforward_residual.norm", "model.encoder.layers.{i}.final_layer_norm"),
    ("decoder.blocks.{i}.own.query", "model.decoder.layers.{i}.self_attn.q_proj"),
    ("decoder.blocks.{i}.own.key", "model.decoder.layers.{i}.self_attn.k_proj"),
    ("decoder.blocks.{i}.own.value", "model.decoder.layers.{i}.self_attn.v_proj"),
    ("decoder.blocks.{i}.own.output", "model.decoder.layers.{i}.self_attn.out_proj"),
    ("decoder.blocks.{i}.own_residual.norm", "model.decoder.layers.{i}.self_attn_layer_norm"),
    ("decoder.blocks.{i}.cross.query", "model.decoder.layers.{i}.encoder_attn.q_proj"),
    ("decoder.blocks.{i}.cross.key", "model.decoder.layers.{i}.encoder_attn.k_proj"),
    ("decoder.blocks.{i}.cross.value", "model.decoder.layers.{i}.encoder_attn.v_proj"),
    ("decoder.blocks.{i}.cross.output", "model.decoder.layers.{i}.encoder_attn.out_proj"),
    ("decoder.blocks.{i}.cross_residual.norm", "model.decoder.layers.{i}.encoder_attn_layer_norm"),
    ("decoder.blocks.{i}.feedforward.expand", "model.decoder.layers.{i}.fc1"),
    ("decoder.blocks.{i}.feedforward.contract", "model.decoder.layers.{i}.fc2"),
    ("decoder.blocks.{i}.feedforward_residual.norm", "model.decoder.layers.{i}.final_layer_norm"),
]
SOURCE = "model.encoder.embed_tokens.weight"
TARGET = "model.decoder.embed_tokens.weight"
OUTPUT = "lm_head.weight"
ENDS = [  # ours, theirs
    ("source_embedding.weight", SOURCE),
    ("target_embedding.weight", TARGET),
    ("output.weight", OUTPUT),
]
BIAS = ("output.bias", "final_logits_bias")  # (V,), (1, V)
SHARED = "model.shared.weight"  # stands for all of ENDS that are tied
TABLES = (  # sinusoids, in some files
    "model.encoder.embed_positions.weight",
    "model.decoder.embed_positions.weight",
)


def names(config: Seq2SeqConfig) -> Iterator[tuple[str, str]]:
    """Every tensor of a model: our name and theirs."""
    yield from ENDS
    if config.output_bias:
        yield BIAS
    layers = {"encoder": config.encoder.layers, "decoder": config.decoder.layers}
    for ours, theirs in MODULES:
        for i in range(layers[ours.partition(".")[0]]):
            for leaf in ("weight", "bias"):
                yield f"{ours}.{leaf}".format(i=i), f"{theirs}.{leaf}".format(i=i)


# --- settings -------------------------------------------------------------------------------------

ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
THEIR_ACTIVATIONS: dict[Activation, str] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "silu": "swish",
}
NORM_EPS = 1e-5  # transformers has it in the code, not in the config


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The keys of a Marian config.json that say what the model is. Defaults are those of `transformers`."""

    vocab_size: int
    decoder_vocab_size: int | None = None
    d_model: int
    encoder_layers: int
    encoder_attention_heads: int
    encoder_ffn_dim: int
    decoder_layers: int
    decoder_attention_heads: int
    decoder_ffn_dim: int
    activation_function: Literal["relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "silu", "swish"] = "gelu"
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    scale_embedding: bool = False
    share_encoder_decoder_embeddings: bool = True
    tie_word_embeddings: bool = True
    decoder_start_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None


TOKENS = ("decoder_start_token_id", "pad_token_id", "eos_token_id")  # may stand in generation_config.json too

FIXED: dict[str, tuple[object, ...]] = {  # key -> values that mean what we compute; the first is the usual one
    "model_type": ("marian",),
    "architectures": (["MarianMTModel"], None),
    "is_encoder_decoder": (True,),
    "is_decoder": (False,),
    "normalize_before": (False,),
    "normalize_embedding": (False,),
    "add_final_layer_norm": (False,),
    "static_position_embeddings": (True,),
    "encoder_layerdrop": (0,),
    "decoder_layerdrop": (0,),
    "tie_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({}, None),
    "per_layer_config": (None, {}),
}

ALIASES = {  # transformers lets these overrule the others
    "hidden_size": "d_model",
    "num_attention_heads": "encoder_attention_heads",
    "num_hidden_layers": "encoder_layers",
}

HARMLESS = {  # why a key cannot change what the model computes -> such keys
    "how transformers is called, and where a file came from": """
        _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path _num_labels
        attn_implementation chunk_size_feed_forward dtype finetuning_task gradient_checkpointing id2label
        label2id name_or_path num_labels output_attentions output_hidden_states output_past problem_type
        return_dict task_specific_params tokenizer_class torch_dtype torchscript transformers_version
        use_bfloat16 use_cache xla_device
    """.split(),
    "first values of weights, and classifiers: not of a stored translator": """
        classif_dropout classifier_dropout init_std initializer_range
    """.split(),
    "how many sinusoids to keep ready; we compute each when it is needed": """
        extra_pos_embeddings max_position_embeddings
    """.split(),
    "never read by transformers, true or false: the bias is there when its tensor is": """
        add_bias_logits
    """.split(),
    "token ids that a translator does not need": """
        bos_token_id sep_token_id unk_token_id
    """.split(),
    "search: left to whoever searches": """
        bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
        encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff
        exponential_decay_length_penalty force_bos_token_to_be_generated force_words_ids forced_bos_token_id
        forced_eos_token_id length_penalty max_length max_new_tokens min_length no_repeat_ngram_size
        num_beam_groups num_beams num_return_sequences output_scores prefix remove_invalid_values
        renormalize_logits repetition_penalty return_dict_in_generate suppress_tokens temperature
        tf_legacy_loss top_k top_p typical_p
    """.split(),
}


def read_facts(root: Path) -> Facts:
    """The facts of a folder, after every key of its config.json has been accounted for."""
    where = root / files.CONFIG
    data = files.read_json(where)
    mapped = {field.name for field in fields(Facts)}
    for key, value in data.items():
        check_key(key, value, data, mapped, where)
    known = {key: value for key, value in data.items() if key in mapped}
    for key, value in known.items():
        if isinstance(value, int) and value > LARGEST:
            raise FolderError(f"{where}: `{key}` must be at most {LARGEST}, but is {value:.3g}; correct it")
    try:
        return settings.from_dict(Facts, with_generation_tokens(known, root), where=str(where))
    except settings.SettingsError as error:
        raise FolderError(str(error)) from error


def check_key(key: str, value: object, data: Mapping[str, Any], mapped: set[str], where: Path) -> None:
    """Refuses a key that we do not know, or a value of it that we do not compute."""
    if key in FIXED and not any(same(value, wanted) for wanted in FIXED[key]):
        raise FolderError(
            f"{where}: `{key}` must be {FIXED[key][0]!r} for a Marian model that attent can compute, "
            f"but is {files.quoted(value)}"
        )
    if key in ALIASES and not same(value, data.get(ALIASES[key])):
        raise FolderError(
            f"{where}: `{key}` must equal `{ALIASES[key]}`={data.get(ALIASES[key])!r}, but is "
            f"{files.quoted(value)}; find out which one is true of the weights, and give both that value"
        )
    if key not in mapped and key not in FIXED and key not in ALIASES and not is_harmless(key):
        near = get_close_matches(key, [*mapped, *FIXED], n=1, cutoff=0.8)
        hint = f" (did you mean `{near[0]}`?)" if near else ""
        raise FolderError(
            f"{where}: {files.quoted(key)} is not a key of a Marian config that attent knows{hint}, and "
            f"might change what the model computes; take a version of the model without it, or remove the key "
            f"from the file if you know that it does not"
        )


def is_harmless(key: str) -> bool:
    return any(key in keys for keys in HARMLESS.values())


def same(value: object, wanted: object) -> bool:
    """Equal, and not a truth value where a number is meant or the other way round."""
    return value == wanted and isinstance(value, bool) == isinstance(wanted, bool)


def with_generation_tokens(data: dict[str, Any], root: Path) -> dict[str, Any]:
    """Token ids from generation_config.json, where there is one; both files must say the same."""
    path = root / files.GENERATION
    generation = files.read_json(path) if path.exists() else {}
    for key in TOKENS:
        here, there = data.get(key), generation.get(key)
        if here is not None and there is not None and here not in (there, [there]) and there != [here]:
            raise FolderError(
                f"{path}: `{key}` must be that of {files.CONFIG}, {files.quoted(here)}, but is "
                f"{files.quoted(there)}; give both files the one that the model was trained with"
            )
        if here is None and there is not None:
            data[key] = there
    return data


def to_config(facts: Facts, *, share: bool, output_bias: bool, where: Path) -> Seq2SeqConfig:
    """Our config of a Marian model. `share` and `output_bias` are what the tensors say."""
    try:
        return Seq2SeqConfig(
            vocab=facts.vocab_size,
            target_vocab=None if share else facts.decoder_vocab_size,
            encoder=to_stack(facts, decoder=False),
            decoder=to_stack(facts, decoder=True),
            share_embeddings=share,
            tie_output=facts.tie_word_embeddings,
            output_bias=output_bias,
            scale_embeddings=facts.scale_embedding,
            start=start_of(facts, where),
            end=end_of(facts, where),
        )
    except ValueError as error:
        raise FolderError(str(error) if isinstance(error, FolderError) else f"{where}: {error}") from error


def to_stack(facts: Facts, *, decoder: bool) -> StackConfig:
    return StackConfig(
        layers=facts.decoder_layers if decoder else facts.encoder_layers,
        width=facts.d_model,
        heads=facts.decoder_attention_heads if decoder else facts.encoder_attention_heads,
        inner=facts.decoder_ffn_dim if decoder else facts.encoder_ffn_dim,
        activation=ACTIVATIONS[facts.activation_function],
        causal=decoder,
        cross=decoder,
        positions=SinusoidalConfig(order="halves"),
        norm_eps=NORM_EPS,
        dropout=facts.dropout,
        attention_dropout=facts.attention_dropout,
        activation_dropout=facts.activation_dropout,
    )


def start_of(facts: Facts, where: Path) -> int:
    """What the decoder reads first. Published models start from the padding token."""
    start = facts.pad_token_id if facts.decoder_start_token_id is None else facts.decoder_start_token_id
    if start is None:
        raise FolderError(f"{where}: missing key `decoder_start_token_id`, the decoder's first; add it")
    return start


def end_of(facts: Facts, where: Path) -> int:
    ends = facts.eos_token_id if isinstance(facts.eos_token_id, tuple) else (facts.eos_token_id,)
    if len(ends) != 1 or ends[0] is None:
        raise FolderError(
            f"{where}: `eos_token_id` must be one token id, the one that ends a sentence, but is "
            f"{files.quoted(facts.eos_token_id)}; give that one"
        )
    return ends[0]


# --- in -------------------------------------------------------------------------------------------


def load(folder: str | os.PathLike[str]) -> Seq2Seq:
    """The MarianMTModel of a Hugging Face folder, in eval mode, in the precision it was stored in."""
    root = Path(folder).expanduser()
    files.check_folder(root, os.fspath(folder))
    facts, tensors = read_facts(root), files.read_tensors(root)
    where = root / files.WEIGHTS
    check_sizes(facts, tensors, where)
    tensors = without_tables(tensors, facts.d_model, where)
    tensors, share = resolve_ties(tensors, facts, where)
    config = to_config(facts, share=share, output_bias=BIAS[1] in tensors, where=root / files.CONFIG)
    model = build_empty(config)
    expected = their_shapes(model)
    check_tensors(expected, tensors, where)
    ours = {
        our_name: tensors[their_name].reshape(model.state_dict()[our_name].shape)
        for our_name, their_name in names(config)
    }
    return fill(model, ours, str(where))


def check_sizes(facts: Facts, tensors: Mapping[str, Tensor], where: Path) -> None:
    """Refuses what no model can be built from: more layers than tensors, numbers that do not mix."""
    for key in ("encoder_layers", "decoder_layers"):
        if getattr(facts, key) > len(tensors):
            problem = f"too few for `{key}`={getattr(facts, key)}"
            raise FolderError(f"{where}: holds {len(tensors)} tensors, {problem}; get the model again")
    for name, tensor in tensors.items():
        first, dtype = next((name, tensor.dtype) for name, tensor in tensors.items())
        if not tensor.is_floating_point() or tensor.dtype != dtype:
            raise FolderError(
                f"{where}: all tensors must be of one floating type, but `{first}` is {dtype} and `{name}` "
                f"is {tensor.dtype}; save the model in one precision first"
            )


def without_tables(tensors: Mapping[str, Tensor], width: int, where: Path) -> dict[str, Tensor]:
    """The tensors but for the sinusoids, which we compute ourselves: stored ones must be the same."""
    for name in TABLES:
        table = tensors.get(name)
        if table is None:
            continue
        if table.dim() != 2 or table.shape[1] != width:
            raise FolderError(f"{where}: `{name}` must be (positions, {width}), but is {tuple(table.shape)}")
        ours = sinusoid(torch.arange(table.shape[0]), width, "halves")
        worst = float((table.float() - ours).abs().max()) if table.numel() else 0.0
        if not worst <= max(1e-5, torch.finfo(table.dtype).eps):
            raise FolderError(
                f"{where}: `{name}` must hold the sinusoids of Marian, but differs from them by up to "
                f"{worst:.2g}; learned or other positions are not supported for Marian"
            )
    return {name: tensor for name, tensor in tensors.items() if name not in TABLES}


def resolve_ties(tensors: dict[str, Tensor], facts: Facts, where: Path) -> tuple[dict[str, Tensor], bool]:
    """The tensors, with each of ENDS under its own name; and whether source and target share theirs.

    Of tensors that are tied, a file may hold any one name, or several with the same numbers.
    """
    share, tie = facts.share_encoder_decoder_embeddings, facts.tie_word_embeddings
    if share and not tie and SOURCE in tensors and TARGET in tensors:
        # Told not to tie the output, transformers 5 unties all three, and reads model.shared.weight nowhere.
        share = torch.equal(tensors[SOURCE], tensors[TARGET])
        tensors = {name: tensor for name, tensor in tensors.items() if name != SHARED}
    inputs = [[SHARED, SOURCE, TARGET]] if share else [[SOURCE], [TARGET]]
    groups = [*inputs[:-1], [*inputs[-1], OUTPUT]] if tie else [*inputs, [OUTPUT]]
    resolved = dict(tensors)
    for group in groups:
        tensor = the_one(group, tensors, where)
        resolved |= dict.fromkeys(group, tensor)
    if share:
        del resolved[SHARED]
    return resolved, share


def the_one(group: list[str], tensors: Mapping[str, Tensor], where: Path) -> Tensor:
    """The tensor that stands under any of several tied names."""
    found = [name for name in group if name in tensors]
    if not found:
        wanted = " or ".join(f"`{name}`" for name in group)
        raise FolderError(f"{where}: missing: {wanted}; get the model again")
    for name in found[1:]:
        if not torch.equal(tensors[name], tensors[found[0]]):
            raise FolderError(
                f"{where}: `{found[0]}` and `{name}` must be equal, as {files.CONFIG} ties them, but differ; "
                f"correct `share_encoder_decoder_embeddings` or `tie_word_embeddings` there"
            )
    return tensors[found[0]]


def their_shapes(model: Seq2Seq) -> dict[str, torch.Size]:
    """What a file must hold for a model, under their names."""
    shapes = {theirs: model.state_dict()[ours].shape for ours, theirs in names(model.config)}
    if model.config.output_bias:
        shapes[BIAS[1]] = torch.Size((1, model.config.targets))
    return shapes


# --- out ------------------------------------------------------------------------------------------

SEARCH_LENGTH = 512  # generate() stops there; without it, after 20 tokens
POSITIONS = 1024  # of transformers' table of sinusoids; longer sentences fail there


def save(model: Seq2Seq, folder: str | os.PathLike[str], *, pad: int | None = None) -> None:
    """Writes a new folder that `MarianMTModel.from_pretrained` of `transformers` loads; without a tokenizer.

    `pad` is the token id that fills up short rows. We need none (padding is told by lengths), but
    `transformers` fills finished rows with it, guesses masks from it, and gives its embedding no gradient. It
    must not occur in sentences: the default is the start token, as in the published Marian models.

    Pruned heads are put back as zeros, since Marian has as many in each layer: it translates the same, no quicker.
    """
    model = unpruned(model)
    check_expressible(model.config)
    pad = checked_pad(model.config, pad)
    tensors = {name: tensor.cpu() for name, tensor in tensors_of(model, build_empty(model.config)).items()}
    if model.config.encoder.positions == SinusoidalConfig(order="interleaved"):
        tensors = halves_from_interleaved(tensors)
    stored = to_their_tensors(tensors, model.config)
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    files.write_folder(
        folder,
        config=to_their_config(model.config, pad, dtype),
        generation=generation_config(model.config, pad),
        tensors=stored,
    )


def check_expressible(config: Seq2SeqConfig) -> None:
    """Refuses a model that Marian has no words for, naming the field."""
    for side, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        head_width = stack.width // stack.heads
        wanted: dict[str, tuple[object, ...]] = {
            "kv_heads": (None, stack.heads),
            "head_width": (None, head_width),
            "gated": (False,),
            "window": (None, (None, None)),
            "positions": (SinusoidalConfig(order="halves"), SinusoidalConfig(order="interleaved")),
            "norm": ("layer",),
            "norm_order": ("post",),
            "norm_eps": (NORM_EPS,),
            "bias": (True,),
            "scale": (None, head_width**-0.5),
        }
        for name, values in wanted.items():
            if getattr(stack, name) not in values:
                refuse_field(f"{side}.{name}", getattr(stack, name), f"{values[0]!r}")
    for name in ("activation", "dropout", "attention_dropout", "activation_dropout", "positions"):
        ours = getattr(config.encoder, name)
        if getattr(config.decoder, name) != ours:
            refuse_field(f"decoder.{name}", getattr(config.decoder, name), f"that of the encoder, {ours!r},")


def refuse_field(name: str, value: object, wanted: str) -> None:
    raise ValueError(
        f"`{name}` must be {wanted} for a Marian model, but is {value!r}; this model cannot be written as "
        f"one: keep it as an attent folder (`model.save(folder)`)"
    )


def checked_pad(config: Seq2SeqConfig, pad: int | None) -> int:
    pad = config.start if pad is None else pad
    both = min(config.vocab, config.targets)  # transformers has one pad for both sides
    if not 0 <= pad < both:
        raise ValueError(
            f"`pad` must be a token id of both sides, from 0 to {both - 1}, but is {pad}; "
            f"give one that occurs in no sentence"
        )
    if pad == config.end:
        raise ValueError(f"`pad` must not be the token that ends a sentence, {config.end}; give another")
    return pad


def halves_from_interleaved(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same model with its features in another order: even ones first, then odd ones.

    Marian adds all sines before all cosines, the paper takes turns. Nothing else knows one feature from
    another, so that moving each row and column of width E alike leaves every logit as it was.
    """
    width = tensors["source_embedding.weight"].shape[1]
    order = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])
    axes = {name: feature_axis(name) for name in tensors}
    return {
        name: tensor if (axis := axes[name]) is None else tensor.index_select(axis, order)
        for name, tensor in tensors.items()
    }


def feature_axis(name: str) -> int | None:
    """Along which axis a tensor has the model's features: 0 writes them, 1 reads them, None neither."""
    if name == "output.bias":
        return None
    if name == "output.weight" or name.endswith("_embedding.weight"):
        return 1
    part = name.split(".")[-2]
    if part in ("norm", "contract", "output"):
        return 0
    assert part in ("query", "key", "value", "expand"), name
    return 1 if name.endswith(".weight") else None


def to_their_tensors(tensors: Mapping[str, Tensor], config: Seq2SeqConfig) -> dict[str, Tensor]:
    """What `transformers` expects to find: of tied tensors one name, unless it would not tie them again."""
    theirs = {their_name: tensors[our_name].contiguous() for our_name, their_name in names(config)}
    if config.output_bias:
        theirs[BIAS[1]] = theirs[BIAS[1]].reshape(1, -1)
    if config.tie_output:
        del theirs[OUTPUT]
    if config.share_embeddings:
        theirs[SHARED] = theirs[SOURCE]
        for name in (SOURCE, TARGET):
            if config.tie_output:
                del theirs[name]
            else:
                theirs[name] = theirs[name].clone()  # safetensors stores no memory twice
    return theirs


def to_their_config(config: Seq2SeqConfig, pad: int, dtype: str) -> dict[str, Any]:
    encoder, decoder = config.encoder, config.decoder
    return {
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        "is_encoder_decoder": True,
        "vocab_size": config.vocab,
        "decoder_vocab_size": config.targets,
        "d_model": encoder.width,
        "encoder_layers": encoder.layers,
        "encoder_attention_heads": encoder.heads,
        "encoder_ffn_dim": encoder.inner,
        "decoder_layers": decoder.layers,
        "decoder_attention_heads": decoder.heads,
        "decoder_ffn_dim": decoder.inner,
        "activation_function": THEIR_ACTIVATIONS[encoder.activation],
        "dropout": encoder.dropout,
        "attention_dropout": encoder.attention_dropout,
        "activation_dropout": encoder.activation_dropout,
        "scale_embedding": config.scale_embeddings,
        "share_encoder_decoder_embeddings": config.share_embeddings,
        "tie_word_embeddings": config.tie_output,
        "static_position_embeddings": True,
        "normalize_before": False,
        "normalize_embedding": False,
        "max_position_embeddings": POSITIONS,
        "decoder_start_token_id": config.start,
        "eos_token_id": config.end,
        "forced_eos_token_id": config.end,
        "bos_token_id": None,
        "pad_token_id": pad,
        "dtype": dtype,
    }


def generation_config(config: Seq2SeqConfig, pad: int) -> dict[str, Any]:
    """How generate() searches unless told otherwise: like published Marian models, never writing padding."""
    return {
        "decoder_start_token_id": config.start,
        "eos_token_id": config.end,
        "forced_eos_token_id": config.end,
        "pad_token_id": pad,
        "bad_words_ids": [[token] for token in sorted({pad, config.start} - {config.end})],
        "renormalize_logits": True,
        "max_length": SEARCH_LENGTH,
        "num_beams": 4,
    }
