"""Generation matches transformers and plain loops, alone and in batches, with static and dynamic state; stop strings,
streaming and error messages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attent.decoding.engines.reference import SearchCancelled
from attent.decoding.generation import loop
from attent.decoding.generation.generator import Generator, decode_continuation
from attent.decoding.generation.loop import (
    DynamicState,
    EncodedPrompt,
    GenerationContext,
    GenerationLoop,
    SequenceBatch,
    StaticState,
    StepOptions,
    generate_batch,
    select_tokens,
)
from attent.decoding.options import GenerationOptions, SamplingOptions
from attent.models import CausalLM
from attent.text.tokenizer import Tokenizer
from tests.decoding.toy_generators import (
    LONGEST,
    PROMPTS,
    byte_level,
    fallback,
    generator,
    gpt2,
    llama,
    sentencepiece_tokenizer,
)

CPU = torch.device("cpu")
MODELS = {"gpt2": gpt2, "llama": llama}
MANNERS = {
    "greedy": StepOptions(end_ids=(5, *range(100, 140)), suppressed_tokens=(7, 9)),
    "drawn": StepOptions(
        end_ids=(5, *range(100, 120)),
        sampling=SamplingOptions(temperature=1.3, top_k=30, top_p=0.9),
    ),
    "endless": StepOptions(end_ids=()),
}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
every_manner = pytest.mark.parametrize("manner", MANNERS.values(), ids=MANNERS)


def make_prompts(
    lengths: tuple[int, ...] = (3, 12, 1, 7), limits: tuple[int, ...] = (12, 6, 16, 1)
) -> list[EncodedPrompt]:
    rng = torch.Generator().manual_seed(1)
    drawn = [torch.randint(0, 300, (length,), generator=rng).tolist() for length in lengths]
    both = zip(drawn, limits, strict=True)
    return [
        EncodedPrompt(token_ids=ids, max_new_tokens=limit, rng_key=11 * index)
        for index, (ids, limit) in enumerate(both)
    ]


def generate_by_hand(
    model: CausalLM, prompt: EncodedPrompt, ends: tuple[int, ...], never: tuple[int, ...] = ()
) -> tuple[list[int], float]:
    """Generate greedily with a full forward pass per token."""
    ids, total = list(prompt.token_ids), 0.0
    for _ in range(prompt.max_new_tokens):
        logits = model(torch.tensor([ids]))[0, -1].detach()
        logits[list(never)] = float("-inf")
        token = int(logits.argmax())
        total += float(logits.log_softmax(-1)[token])
        ids.append(token)
        if token in ends:
            break
    return ids[len(prompt.token_ids) :], total


# --- ids -------------------------------------------------------------------------------------------------------------


@every_model
def test_greedy_generation_matches_a_plain_loop_again_and_again(make: Any) -> None:
    model, manner, prompts = make(sentencepiece_tokenizer()).double(), MANNERS["greedy"], make_prompts()
    sequences = generate_batch(
        prompts, DynamicState(model, prompts, GenerationContext.from_options(manner, CPU)), manner.end_ids
    )
    for prompt, sequence in zip(prompts, sequences, strict=True):
        ids, total = generate_by_hand(model, prompt, manner.end_ids, manner.suppressed_tokens)
        assert list(sequence.token_ids) == [token for token in ids if token not in manner.end_ids]
        assert sequence.finish_reason == ("end" if ids[-1] in manner.end_ids else "length")
        assert sum(sequence.log_probs) == pytest.approx(total, abs=1e-4)


@every_model
@every_manner
@pytest.mark.parametrize("interval", [1, 7], ids=["every step", "every 7 steps"])
def test_static_state_stays_equal_to_dynamic_state_when_used_again(
    make: Any, manner: StepOptions, interval: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plan = make(sentencepiece_tokenizer()), GenerationContext.from_options(manner, CPU)
    static_state = StaticState(model, 4, 36, plan)  # finished rows would overflow if they kept stepping
    monkeypatch.setattr(loop, "GRAPH_COLUMNS", 5)
    for lengths in ((3, 30, 1, 7), (9, 2, 20, 1), (4, 4, 4, 4)):
        prompts = make_prompts(lengths)
        monkeypatch.setattr(loop, "get_poll_interval", lambda device: 1)
        plain = generate_batch(prompts, DynamicState(model, prompts, plan), manner.end_ids)
        monkeypatch.setattr(loop, "get_poll_interval", lambda device: interval)
        static_state.load_prompts(prompts)
        assert generate_batch(prompts, static_state, manner.end_ids) == ApproxSequences(plain)


@every_model
@every_manner
def test_a_prompt_in_company_gives_the_same_tokens_as_alone(make: Any, manner: StepOptions) -> None:
    model, prompts, plan = make(sentencepiece_tokenizer()), make_prompts(), GenerationContext.from_options(manner, CPU)
    together = generate_batch(prompts, DynamicState(model, prompts, plan), manner.end_ids)
    alone = [generate_batch([prompt], DynamicState(model, [prompt], plan), manner.end_ids)[0] for prompt in prompts]
    assert together == ApproxSequences(alone)


class ApproxSequences(list[Any]):
    """Sequences that compare equal up to rounding of their log-probabilities."""

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, list)
        close = all(x.log_probs == pytest.approx(y.log_probs, abs=1e-4) for x, y in zip(self, other, strict=True))
        return close and [(x.token_ids, x.finish_reason) for x in self] == [
            (x.token_ids, x.finish_reason) for x in other
        ]

    __hash__ = None  # type: ignore[assignment]


def test_finished_rows_are_removed() -> None:
    model, prompts = gpt2(sentencepiece_tokenizer()), make_prompts((3, 3, 5, 6), (2, 2, 2, 12))
    work = GenerationLoop(
        prompts, DynamicState(model, prompts, GenerationContext.from_options(MANNERS["endless"], CPU)), ()
    )
    for _ in range(2):
        work.run_steps()
        work.pop_finished()
    assert work.row_prompts == [3]
    assert work.state.sequences.input_tokens.shape == (1,)


# --- against transformers ---------------------------------------------------------------------------------------------


def write_transformers_folder(family: str, folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    sizes = {"vocab_size": byte_level().target.size, "bos_token_id": 0, "eos_token_id": [0, 40]}
    if family == "gpt2":
        config = transformers.GPT2Config(n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.4, **sizes)
        theirs = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.4,
            max_position_embeddings=64,
            **sizes,
        )
        theirs = transformers.LlamaForCausalLM(config)
    theirs.eval().save_pretrained(folder)
    byte_level().save(folder)
    return theirs


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_greedy_tokens_match_transformers(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attent.decoding.generation.generator.CPU_MAX_ROWS", 3)
    theirs = write_transformers_folder(family, tmp_path)
    mine = Generator.load(tmp_path, device="cpu")
    assert mine.end_ids == (0, 40)
    generations = mine.generate(PROMPTS, temperature=0, max_new_tokens=16)
    for prompt, (generation,) in zip(PROMPTS, generations, strict=True):
        ids = torch.tensor([mine.encode_prompt(prompt)])
        written = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16, pad_token_id=0
        )[0, ids.shape[1] :].tolist()
        assert list(generation.token_ids) == [token for token in written if token not in (0, 40)]


# --- text -------------------------------------------------------------------------------------------------------------


def test_prompts_in_company_give_the_same_texts_as_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = generator()
    together = mine.generate(PROMPTS, n=2, temperature=1.5, max_new_tokens=10, seed=4)
    alone = [
        mine.generate([prompt], n=2, temperature=1.5, max_new_tokens=10, seed=4, first_index=i)[0]
        for i, prompt in enumerate(PROMPTS)
    ]
    assert [[sample.token_ids for sample in samples] for samples in together] == [
        [sample.token_ids for sample in samples] for samples in alone
    ]
    monkeypatch.setattr("attent.decoding.generation.generator.CPU_MAX_ROWS", 3)
    assert [samples[0].text for samples in mine.generate(PROMPTS, n=1, temperature=1.5, max_new_tokens=10, seed=4)] == [
        samples[0].text for samples in together
    ]


@pytest.mark.parametrize("stop", [(), ("e", "k")], ids=["", "stop"])
def test_captured_steps_generate_the_same(stop: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, quick = generator(), Generator(generator().model, byte_level())
    option_sets = [
        GenerationOptions(temperature=t, max_new_tokens=20, seed=seed, stop=stop)
        for t, seed in ((0, 1), (1.5, 2), (1.5, 3))
    ]
    known = [plain.generate(PROMPTS, options) for options in option_sets]
    monkeypatch.setattr(loop, "can_capture_graphs", lambda device: True)
    monkeypatch.setattr(loop, "get_poll_interval", lambda device: 16)
    states = []
    for options, before in zip(option_sets, known, strict=True):
        generations = quick.generate(PROMPTS, options)
        assert [
            (sample.text, sample.token_ids, sample.finish_reason) for samples in generations for sample in samples
        ] == [(sample.text, sample.token_ids, sample.finish_reason) for samples in before for sample in samples]
        totals = [[sample.log_prob for samples in both for sample in samples] for both in (generations, before)]
        assert totals[0] == pytest.approx(totals[1], abs=1e-3)
        assert quick.generate(PROMPTS, options) == generations
        assert quick._static_state is not None
        states.append(quick._static_state[1])
    assert states[1] is states[2]  # another seed does not capture again
    assert "".join(quick.stream(PROMPTS[0], option_sets[-1])) == known[-1][0][0].text


def test_samples_differ_and_repeat_with_their_seed() -> None:
    mine, writing = generator(), GenerationOptions(n=4, temperature=1.2, max_new_tokens=12, seed=7)
    first = mine.generate(["A man"], writing)[0]
    assert len({sample.token_ids for sample in first}) == 4
    assert mine.generate(["A man"], writing)[0] == first
    assert [sample.token_ids for sample in mine.generate(["A man"], writing, n=2)[0]] == [
        sample.token_ids for sample in first[:2]
    ]
    assert mine.generate(["A man"], writing, seed=8)[0][0].token_ids != first[0].token_ids
    parts = [mine.generate([prompt], writing, first_index=index)[0] for index, prompt in enumerate(["A man", "A man"])]
    assert mine.generate(["A man", "A man"], writing) == parts


@pytest.mark.parametrize(
    "words", [byte_level, sentencepiece_tokenizer, fallback], ids=["bytes", "sentencepiece", "fallback"]
)
@pytest.mark.parametrize("stop", [(), ("e",), ("an", "er ", "t")], ids=["none", "a letter", "words"])
def test_streamed_pieces_join_to_the_whole_text(words: Any, stop: tuple[str, ...]) -> None:
    mine = Generator(gpt2(words()), words())
    for seed in range(3):
        writing = GenerationOptions(temperature=2.0, top_p=1.0, max_new_tokens=25, seed=seed, stop=stop)
        (whole,) = mine.generate(["Ein Mann läuft"], writing)[0]
        pieces = list(mine.stream("Ein Mann läuft", writing))
        assert "".join(pieces) == whole.text
        assert "" not in pieces
        assert not any(word in whole.text for word in stop)
        assert stop or mine.generate(["Ein Mann läuft"], writing, stop=["never comes"])[0][0].text == whole.text


def test_an_end_id_beyond_the_vocabulary_ends_the_text() -> None:
    words = byte_level()
    end = words.target.size + 1
    mine = Generator(gpt2(words, ends=(end,)), words)
    often = mine.generate(["A man"], temperature=0, max_new_tokens=3)[0][0].token_ids[-1]
    with torch.no_grad():
        mine.model.embedding.weight[end] = 1.1 * mine.model.embedding.weight[often]
    (generation,) = mine.generate(["A man"], temperature=0, max_new_tokens=9)[0]
    assert generation.finish_reason == "end"
    assert end not in generation.token_ids


def test_extra_tokens_without_text_are_accepted() -> None:
    words = byte_level()
    model = gpt2(words)
    for text, accepted in (("", True), ("x", False)):
        more = replace(words, target=PaddedVocabulary(words.target, model.config.vocab + 1, text))  # type: ignore[arg-type]
        if accepted:
            assert Generator(model, more).generate(["A"], max_new_tokens=2)
        else:
            with pytest.raises(ValueError, match="at most the model's"):
                Generator(model, more)


class PaddedVocabulary:
    """A vocabulary with additional tokens that all decode to one text."""

    def __init__(self, words: Any, size: int, text: str) -> None:
        self.words, self.size, self.text = words, size, text

    def __getattr__(self, name: str) -> Any:
        return getattr(self.words, name)

    def decode(self, ids: list[int]) -> str:
        return self.text if ids and max(ids) >= self.words.size else str(self.words.decode(ids))


def test_a_tiny_temperature_is_greedy() -> None:
    mine = generator()
    greedy = [samples[0].token_ids for samples in mine.generate(PROMPTS, temperature=0, max_new_tokens=8)]
    for temperature in (1e-9, 1e-40, 5e-324):
        generations = mine.generate(PROMPTS, temperature=temperature, top_p=1.0, max_new_tokens=8)
        assert [samples[0].token_ids for samples in generations] == greedy


def test_a_text_that_cannot_fit_into_memory_is_rejected() -> None:
    with pytest.raises(ValueError, match="`max_new_tokens` must be small enough for one text"):
        Generator(llama(sentencepiece_tokenizer()), sentencepiece_tokenizer()).generate(
            ["A man"], max_new_tokens=10**12
        )


def test_a_text_ends_before_the_stop_string() -> None:
    mine = generator()
    free = mine.generate(["A man"], seed=2, temperature=1.0, max_new_tokens=40)[0][0]
    word = free.text[9:13]
    at = free.text.index(word)
    held = mine.generate(["A man"], seed=2, temperature=1.0, max_new_tokens=40, stop=[word])[0][0]
    assert (held.text, held.finish_reason) == (free.text[:at], "stop")
    assert held.token_ids == free.token_ids[: len(held.token_ids)]
    assert held.log_prob > free.log_prob
    assert mine.vocabulary.decode(held.token_ids).startswith(free.text[: at + len(word)])


def test_a_continuation_keeps_its_leading_space() -> None:
    for words in (sentencepiece_tokenizer(), byte_level()):
        mine, vocabulary = Generator(gpt2(words), words), words.target
        prompt, whole = (vocabulary.encode([text])[0] for text in ("A man", "A man slowly walking"))
        assert whole[: len(prompt)] == prompt
        assert decode_continuation(vocabulary, mine.encode_prompt("A man"), whole[len(prompt) :]) == " slowly walking"


def test_prompt_and_text_fit_into_the_positions() -> None:
    messages: list[str] = []
    mine = Generator(gpt2(byte_level(), ends=()), byte_level(), notify=messages.append)
    mine.end_ids = ()  # type: ignore[misc]
    generations = mine.generate(["x" * 50, "x"], temperature=0, max_new_tokens=40)
    expected_lengths = [LONGEST - 50 + 1, 40]  # the last token needs no position
    assert [len(samples[0].token_ids) for samples in generations] == expected_lengths
    (message,) = messages
    assert message.startswith("fewer than 40 tokens (at least 11) are generated after 1 of 2 prompts")
    assert [len(samples[0].token_ids) for samples in mine.generate(["x" * LONGEST], temperature=0)] == [1]
    with pytest.raises(ValueError, match=r"prompt 2 must have at most the model's 60 tokens, but has 61; shorten it"):
        mine.generate(["x", "x" * 61])


@pytest.mark.parametrize("quick", [False, True], ids=["", "recorded"])
def test_the_last_positions_give_the_same_alone_as_in_company(quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Generator(gpt2(byte_level(), ends=()), byte_level())
    mine.end_ids = ()  # type: ignore[misc]
    monkeypatch.setattr(loop, "can_capture_graphs", lambda device: quick)
    monkeypatch.setattr(loop, "get_poll_interval", lambda device: 16 if quick else 1)
    prompts = ["x" * 60, "x" * 52, "y", "z" * 59, "z" * 10, "y" * 20]
    token_ids = [samples[0].token_ids for samples in mine.generate(prompts, temperature=0, max_new_tokens=30)]
    assert [len(ids) for ids in token_ids] == [1, 9, 30, 2, 30, 30]
    for prompt, ids in zip(prompts, token_ids, strict=True):
        encoded = EncodedPrompt(token_ids=mine.encode_prompt(prompt), max_new_tokens=len(ids))
        assert list(ids) == generate_by_hand(mine.model, encoded, (), mine._suppressed_tokens)[0]


def test_an_empty_prompt_becomes_the_start_token() -> None:
    assert generator().encode_prompt("") == [byte_level().target.start]
    assert Generator(gpt2(sentencepiece_tokenizer()), sentencepiece_tokenizer()).encode_prompt("") == [
        sentencepiece_tokenizer().target.start
    ]
    assert generator().generate([], max_new_tokens=3) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 0}, "`max_new_tokens` must be 1 or more"),
        ({"temperature": -1}, "`temperature` must be 0 or more"),
        ({"top_p": 0}, "`top_p` must be greater than 0"),
        ({"temperature": 0, "n": 2}, "all texts would be equal"),
        ({"stop": [""]}, "but one is empty"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        generator().generate(["A"], **options)


def test_invalid_prompts_and_tokenizers_are_rejected() -> None:
    with pytest.raises(ValueError, match="must be a list of strings, but is one: 'A man'"):
        generator().generate("A man")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at most the model's"):
        Generator(gpt2(byte_level()), enlarge_vocabulary(byte_level()))


def enlarge_vocabulary(words: Tokenizer) -> Tokenizer:
    class Larger:
        size = 10**6

        def decode(self, ids: list[int]) -> str:
            return "x"

    return replace(words, target=Larger())  # type: ignore[arg-type]


def test_should_stop_cancels_generation() -> None:
    with pytest.raises(SearchCancelled):
        generator().generate(["A man"], should_stop=lambda: True)


def test_half_precision_logits_are_normalized_in_float32() -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(0)).bfloat16()
    context = GenerationContext.from_options(StepOptions(end_ids=(5,), suppressed_tokens=(7,)), CPU)
    prompts = [EncodedPrompt(token_ids=(0,), max_new_tokens=4)] * 3
    sequences = SequenceBatch.from_prompts(torch.zeros(3, dtype=torch.int64), prompts, 4)
    token, log_prob = select_tokens(logits, sequences, context)
    expected = logits.float().index_fill(-1, torch.tensor([7]), float("-inf")).log_softmax(-1)
    assert torch.equal(token, expected.argmax(-1))
    assert log_prob.dtype == torch.float32
    assert torch.allclose(log_prob, expected.gather(-1, token[:, None])[:, 0], rtol=0, atol=1e-5)
    exact = select_tokens(logits.double(), sequences, context)[1]
    assert torch.allclose(exact, log_prob, rtol=0, atol=1e-5)
