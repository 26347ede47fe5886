"""What the parity tests of GPT-2 and LLaMA share: ragged texts, the same numbers from both, greedy writing with the
cache."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attent.interop import load_as
from attent.models import CausalLM
from tests.interop.exact import exact, gradient_errors, projection, randomise, same_bits, save_gradients

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()


class Texts(NamedTuple):
    """Ragged texts, padded on the right with real ids: whoever looks at the padding gives itself away."""

    ids: Tensor
    lengths: Tensor

    @property
    def real(self) -> Tensor:
        return torch.arange(self.ids.shape[1]) < self.lengths[:, None]

    @property
    def left(self) -> tuple[Tensor, Tensor]:
        """The same texts with the padding on the left, and which places are real."""
        T = self.ids.shape[1]
        place = torch.arange(T) - (T - self.lengths)[:, None]
        return self.ids.gather(1, place % T), (place >= 0).long()


def random_texts(vocab: int, seed: int, rows: int = 4, longest: int = 9) -> Texts:
    generator = torch.Generator().manual_seed(seed + 1000)
    ids = torch.randint(0, vocab, (rows, longest), generator=generator)
    return Texts(ids, torch.randint(1, longest + 1, (rows,), generator=generator))


def random_model(config: Any, seed: int) -> Any:
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    randomise(model, seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if re.search(r"ln_\w\.weight", name):  # GPT-2's norms, which do not say so in their names
                weight.add_(1)
    return model


def their_logits(model: Any, texts: Texts) -> Tensor:
    with exact(model):
        out: Tensor = model(input_ids=texts.ids, attention_mask=texts.real.long()).logits[texts.real]
    return out


def our_logits(model: CausalLM, texts: Texts) -> Tensor:
    out: Tensor = model(*texts)[texts.real]
    return out


def worst(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).detach().abs().max())


def check_numbers(config: Any, seed: int, folder: Path, save: Any) -> None:
    """Logits, gradients, out and in again, and in float32: all as theirs."""
    theirs, texts = random_model(config, seed), random_texts(config.vocab_size, seed)
    theirs.save_pretrained(folder / "theirs")
    ours = load_as(folder / "theirs", CausalLM)
    expected, got = their_logits(theirs, texts), our_logits(ours, texts)
    assert worst(got, expected) < 1e-10
    save(ours, folder / "out")
    assert worst(their_logits(reopened(folder / "out"), texts), expected) < 1e-10
    assert same_bits(load_as(folder / "out", CausalLM), ours)
    check_single(theirs, folder, texts)
    projection(expected).backward()
    projection(got).backward()
    save_gradients(theirs.double(), folder / "gradients")
    assert not gradient_errors(ours, load_as(folder / "gradients", CausalLM))


def check_single(theirs: Any, folder: Path, texts: Texts) -> None:
    """In float32, which the folder of float64 is converted to while it is loaded."""
    single = reopened(folder / "theirs", torch.float32)
    ours = load_as(folder / "theirs", CausalLM, dtype=torch.float32)
    assert {weight.dtype for weight in ours.parameters()} == {torch.float32}
    assert worst(our_logits(ours, texts), their_logits(single, texts)) < 1e-5


def reopened(folder: Path, dtype: torch.dtype | None = None) -> Any:
    """What `transformers` makes of a folder of ours: nothing missing, nothing left over."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=dtype or "auto"
    )
    assert not any(info.values()), info
    return model.eval()


def check_writing(config: Any, seed: int, folder: Path, *, rows: int, steps: int) -> None:
    """Ragged prompts, gone on with by the likeliest token each time, with the cache; theirs are padded on the left."""
    theirs, texts = random_model(config, seed), random_texts(config.vocab_size, seed, rows, 8)
    with torch.no_grad():
        theirs.get_input_embeddings().weight.mul_(8)  # what was read decides, and not the biases alone
    theirs.save_pretrained(folder)
    theirs.generation_config.eos_token_id = None  # all the steps
    ids, mask = texts.left
    with exact(theirs):
        wanted = theirs.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=steps, pad_token_id=0)
    got = greedy(load_as(folder, CausalLM), texts, steps)
    assert got == wanted[:, ids.shape[1] :].tolist()
    assert len({tuple(row) for row in got}) > rows / 4, "else too much would be alike"


def greedy(model: CausalLM, texts: Texts, steps: int) -> list[list[int]]:
    cache = model.begin(rows=len(texts.ids), capacity=texts.ids.shape[1] + steps)
    logits = model.step(texts.ids, cache, texts.lengths)[torch.arange(len(texts.ids)), texts.lengths - 1]
    written = []
    for _ in range(steps):
        written.append(logits.argmax(-1))
        logits = model.step(written[-1][:, None], cache)[:, 0]
    return torch.stack(written, 1).tolist()


# Folders, changed.


def change_json(folder: Path, name: str = "config.json", /, **changes: Any) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, change: Any) -> None:
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def split(folder: Path, shards: int) -> None:
    """One file of weights becomes several, with their index."""
    tensors = load_file(folder / "model.safetensors")
    homes = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(sorted(tensors))}
    for home in set(homes.values()):
        save_file({name: tensors[name] for name in tensors if homes[name] == home}, folder / home, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    (folder / "model.safetensors").unlink()
