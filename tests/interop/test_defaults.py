"""Defaults of missing config.json keys equal those of `transformers`; all keys of published files are known."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import transformers

from attent.interop import bert, gpt2, llama, marian, t5, vision_encoder_decoder, vit, whisper
from attent.interop.conversion import ConfigKeys, select_schema_keys

ELSEWHERE = {"rope_theta", "rope_scaling", "rope_parameters"}  # transformers derives one from another


@pytest.mark.parametrize(
    ("keys", "hf_config"),
    [
        (gpt2.GPT2Keys, transformers.GPT2Config),
        (llama.LlamaKeys, transformers.LlamaConfig),
        (bert.BertKeys, transformers.BertConfig),
        (vit.ViTKeys, transformers.ViTConfig),
        (t5.T5Keys, transformers.T5Config),
        (whisper.WhisperKeys, transformers.WhisperConfig),
        (marian.MarianKeys, transformers.MarianConfig),
    ],
    ids=["gpt2", "llama", "bert", "vit", "t5", "whisper", "marian"],
)
def test_defaults_match_transformers(keys: type[Any], hf_config: Any) -> None:
    reference = hf_config()
    ours = {field.name: field.default for field in fields(keys) if field.default is not MISSING}
    defaults = {name: value for name, value in ours.items() if value is not None and name not in ELSEWHERE}
    assert len(defaults) > 5
    assert defaults == {name: getattr(reference, name) for name in defaults}


# Published config.json files.

GPT2: dict[str, Any] = json.loads("""{
    "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "summary_first_dropout": 0.1, "n_ctx": 1024,
    "n_positions": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257, "bos_token_id": 50256,
    "eos_token_id": 50256, "activation_function": "gelu_new", "initializer_range": 0.02, "layer_norm_epsilon":
    1e-05, "model_type": "gpt2", "summary_activation": null, "summary_proj_to_labels": true, "summary_type":
    "cls_index", "architectures": ["GPT2LMHeadModel"], "summary_use_proj": true, "task_specific_params":
    {"text-generation": {"do_sample": true, "max_length": 50}}
}""")
GPT2_MEDIUM = GPT2 | json.loads("""{
    "n_embd": 1024, "n_head": 16, "n_layer": 24, "n_special": 0, "predict_special_tokens": true
}""")
GPT2_XL = GPT2 | json.loads("""{
    "n_embd": 1600, "n_head": 25, "n_layer": 48, "output_past": true
}""")
DISTILGPT2 = GPT2 | json.loads("""{
    "n_layer": 6, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "_num_labels": 1
}""")
BERT: dict[str, Any] = json.loads("""{
    "architectures": ["BertForMaskedLM"], "model_type": "bert", "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    "attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1, "initializer_range": 0.02, "hidden_size": 768,
    "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12, "max_position_embeddings": 512,
    "type_vocab_size": 2, "vocab_size": 30522, "pad_token_id": 0, "gradient_checkpointing": false,
    "position_embedding_type": "absolute", "use_cache": true, "transformers_version": "4.6.0.dev0"
}""")
BERT_MULTILINGUAL = BERT | json.loads("""{
    "vocab_size": 119547, "directionality": "bidi", "pooler_type": "first_token_transform", "pooler_fc_size": 768,
    "pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3, "pooler_size_per_head": 128
}""")
VIT: dict[str, Any] = json.loads("""{
    "architectures": ["ViTForImageClassification"], "model_type": "vit", "hidden_act": "gelu", "id2label": {"0":
    "LABEL_0"}, "label2id": {"LABEL_0": 0}, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0,
    "initializer_range": 0.02, "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12,
    "num_hidden_layers": 12, "image_size": 224, "patch_size": 16, "num_channels": 3, "encoder_stride": 16,
    "qkv_bias": true, "layer_norm_eps": 1e-12, "transformers_version": "4.13.0.dev0"
}""")
WHISPER: dict[str, Any] = json.loads("""{
    "activation_dropout": 0.0, "attention_dropout": 0.0, "dropout": 0.0, "decoder_attention_heads": 6,
    "encoder_attention_heads": 6, "decoder_layers": 4, "encoder_layers": 4, "num_hidden_layers": 4,
    "decoder_ffn_dim": 1536, "encoder_ffn_dim": 1536, "decoder_layerdrop": 0.0, "encoder_layerdrop": 0.0,
    "max_length": 448, "max_target_positions": 448, "_name_or_path": "openai/whisper-tiny", "model_type": "whisper",
    "activation_function": "gelu", "architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": true,
    "use_cache": true, "begin_suppress_tokens": [220, 50257], "suppress_tokens": [1, 2, 7], "init_std": 0.02,
    "torch_dtype": "float32", "forced_decoder_ids": [[1, 50259], [2, 50359], [3, 50363]], "transformers_version":
    "4.27.0.dev0", "d_model": 384, "max_source_positions": 1500, "num_mel_bins": 80, "scale_embedding": false,
    "vocab_size": 51865, "bos_token_id": 50257, "decoder_start_token_id": 50258, "eos_token_id": 50257,
    "pad_token_id": 50257
}""")
WHISPER_LARGE_V3 = WHISPER | json.loads("""{
    "num_mel_bins": 128, "vocab_size": 51866, "apply_spec_augment": false, "classifier_proj_size": 256,
    "median_filter_width": 7, "mask_feature_length": 10, "mask_feature_min_masks": 0, "mask_feature_prob": 0.0,
    "mask_time_length": 10, "mask_time_min_masks": 2, "mask_time_prob": 0.05, "use_weighted_layer_sum": false
}""")
# transformers 4 writes these to both sections of an encoder-decoder model.
SECTION: dict[str, Any] = json.loads("""{
    "bad_words_ids": null, "cross_attention_hidden_size": null, "finetuning_task": null, "forced_bos_token_id":
    null, "forced_eos_token_id": null, "prefix": null, "problem_type": null, "sep_token_id": null,
    "tokenizer_class": null, "torch_dtype": null, "bos_token_id": null, "decoder_start_token_id": null,
    "eos_token_id": null, "pad_token_id": null, "task_specific_params": null, "do_sample": false, "early_stopping":
    false, "is_encoder_decoder": false, "output_attentions": false, "output_hidden_states": false, "output_scores":
    false, "remove_invalid_values": false, "return_dict_in_generate": false, "torchscript": false,
    "tie_encoder_decoder": false, "use_bfloat16": false, "add_cross_attention": false, "is_decoder": false,
    "chunk_size_feed_forward": 0, "encoder_no_repeat_ngram_size": 0, "min_length": 0, "no_repeat_ngram_size": 0,
    "diversity_penalty": 1.0, "length_penalty": 1.0, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0,
    "num_beam_groups": 1, "num_beams": 1, "num_return_sequences": 1, "max_length": 20, "top_k": 50, "pruned_heads":
    {}, "return_dict": true, "tie_word_embeddings": true, "_name_or_path": "", "transformers_version": "4.15.0",
    "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}
}""")
VIT_GPT2: dict[str, Any] = json.loads("""{
    "architectures": ["VisionEncoderDecoderModel"], "model_type": "vision-encoder-decoder", "is_encoder_decoder":
    true, "tie_word_embeddings": false, "torch_dtype": "float32", "bos_token_id": 50256, "decoder_start_token_id":
    50256, "eos_token_id": 50256, "pad_token_id": 50256, "transformers_version": null, "encoder": {}, "decoder": {}
}""")
GPT2_DECODER = (
    GPT2
    | SECTION
    | json.loads("""{
    "bos_token_id": 50256, "eos_token_id": 50256, "decoder_start_token_id": 50256, "pad_token_id": 50256,
    "add_cross_attention": true, "is_decoder": true, "n_inner": null, "reorder_and_upcast_attn": false,
    "scale_attn_by_inverse_layer_idx": false, "scale_attn_weights": true, "use_cache": true
}""")
)


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (GPT2, gpt2.CONFIG_KEYS),
        (GPT2_MEDIUM, gpt2.CONFIG_KEYS),
        (GPT2_XL, gpt2.CONFIG_KEYS),
        (DISTILGPT2, gpt2.CONFIG_KEYS),
        (BERT, bert.CONFIG_KEYS),
        (BERT_MULTILINGUAL, bert.CONFIG_KEYS),
        (VIT, vit.CONFIG_KEYS),
        (WHISPER, whisper.CONFIG_KEYS),
        (WHISPER_LARGE_V3, whisper.CONFIG_KEYS),
        (VIT_GPT2, vision_encoder_decoder.CONFIG_KEYS),
        (VIT | SECTION, vit.CONFIG_KEYS),
        (GPT2_DECODER, vision_encoder_decoder.DECODER_KEYS["gpt2"]),
    ],
    ids="gpt2 gpt2-medium gpt2-xl distilgpt2 bert bert-multilingual vit whisper-tiny whisper-large-v3 vit-gpt2 "
    "vit-gpt2-encoder vit-gpt2-decoder".split(),
)
def test_every_key_of_a_published_config_is_accepted(data: dict[str, Any], keys: ConfigKeys[Any]) -> None:
    required = {field.name for field in fields(keys.schema) if field.default is MISSING}
    assert required <= select_schema_keys(data, keys, Path("config.json")).keys()
