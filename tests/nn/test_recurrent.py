"""The LSTM layers against torch's own LSTM, and against attention computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from attent.nn import LSTMDecoder, LSTMDecoderConfig, LSTMEncoder, LSTMEncoderConfig, Memory, Packing
from tests.laws.helpers import assert_close, randomize, unpad

WIDTH = 8
LENGTHS = torch.tensor([5, 2, 4])


def make_decoder(**changes: Any) -> LSTMDecoder:
    config = LSTMDecoderConfig(**{"layers": 1, "width": WIDTH, "dropout": 0.0, **changes})
    return randomize(LSTMDecoder(config).double())


def random_states(*shape: int) -> Tensor:
    return torch.randn(*shape, WIDTH, dtype=torch.float64)


def test_an_encoder_layer_is_a_bidirectional_lstm() -> None:
    encoder = randomize(LSTMEncoder(LSTMEncoderConfig(layers=1, width=WIDTH)).double())
    oracle = nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True).double()
    block = encoder.blocks[0]
    with torch.no_grad():
        for suffix, lstm in (("", block.forward_lstm), ("_reverse", block.backward_lstm)):
            for name, weight in lstm.named_parameters():
                getattr(oracle, name + suffix).copy_(weight)
    x = random_states(3, 5)
    packed = pack_padded_sequence(x, LENGTHS, batch_first=True, enforce_sorted=False)
    expected, _ = pad_packed_sequence(oracle(packed)[0], batch_first=True)
    assert_close(unpad(encoder(x, LENGTHS), LENGTHS), unpad(encoder.norm(expected), LENGTHS))


def test_upper_layers_are_residual() -> None:
    """A layer that adds zeros changes nothing."""
    encoder = randomize(LSTMEncoder(LSTMEncoderConfig(layers=2, width=WIDTH)).double())
    x, first = random_states(3, 5), encoder.blocks[0]
    with torch.no_grad():
        for parameter in [*encoder.blocks[1].forward_lstm.parameters(), *encoder.blocks[1].backward_lstm.parameters()]:
            parameter.zero_()
    out = encoder(x)
    encoder.blocks = nn.ModuleList([first])
    assert_close(out, encoder(x))


def test_a_decoder_without_attention_is_an_lstm_from_the_last_states_of_the_encoder() -> None:
    decoder = make_decoder(attention="none", input_feeding=False)
    states, x = random_states(3, 5), random_states(3, 4)
    ends = torch.stack([torch.cat([row[0], row[length - 1]]) for row, length in zip(states, LENGTHS, strict=True)])
    hidden, cell = decoder.bridge(ends).tanh().chunk(2, -1)
    expected, _ = decoder.blocks[0].lstm(x, (hidden[None], cell[None]))
    assert_close(decoder(x, memory=Memory(states, LENGTHS)), decoder.norm(expected))


def attend_by_hand(decoder: LSTMDecoder, hidden: Tensor, states: Tensor) -> Tensor:
    """The context of one state (E,) over the states (T, E) of a source."""
    attention = decoder.blocks[0].cross_attn
    assert attention is not None
    query, keys, values = attention.query(hidden), attention.key(states), attention.value(states)
    if decoder.config.attention == "additive":
        scores = (query + keys).tanh() @ attention.score_weight
    else:
        scores = keys @ query / WIDTH**0.5
    return attention.output(scores.softmax(0) @ values)


@pytest.mark.parametrize("attention", ["additive", "dot"])
@pytest.mark.parametrize("fed", [True, False])
def test_a_decoder_attends_with_its_state_and_feeds_the_context_back(attention: str, fed: bool) -> None:
    decoder = make_decoder(attention=attention, input_feeding=fed)
    states, x = random_states(3, 5), random_states(3, 4)
    out = decoder(x, memory=Memory(states, LENGTHS))
    lstm = decoder.blocks[0].lstm
    for row, length in enumerate(LENGTHS.tolist()):
        source = states[row, :length]
        hidden, cell = decoder.bridge(torch.cat([source[0], source[-1]])).tanh().chunk(2)
        context = torch.zeros(WIDTH).double()
        for t, token in enumerate(x[row]):
            inputs = torch.cat([token, context]) if fed else token
            _, (h, c) = lstm(inputs[None, None], (hidden[None, None], cell[None, None]))
            hidden, cell = h[0, 0], c[0, 0]
            context = attend_by_hand(decoder, hidden, source)
            assert_close(out[row, t], decoder.norm(hidden + context))


def test_observers_are_called_once_with_all_queries() -> None:
    decoder = make_decoder(layers=2)
    records: list[Any] = []
    decoder.blocks[0].cross_attn.observers.append(records.append)
    decoder(random_states(3, 4), memory=Memory(random_states(3, 5), LENGTHS))
    assert [record.weights.shape for record in records] == [(3, 1, 4, 5)]


def test_dropout_is_used_in_training_only() -> None:
    decoder, x, memory = make_decoder(dropout=0.5, layers=2), random_states(2, 4), Memory(random_states(2, 5))
    assert torch.equal(decoder(x, memory=memory), decoder(x, memory=memory))
    decoder.train()
    assert not torch.equal(decoder(x, memory=memory), decoder(x, memory=memory))


def test_forget_gates_start_open() -> None:
    lstm = LSTMDecoder(LSTMDecoderConfig(width=WIDTH)).blocks[0].lstm
    assert (lstm.bias_ih_l0[WIDTH : 2 * WIDTH] == 1).all()
    assert (lstm.bias_hh_l0 == 0).all()


def test_under_autocast_an_lstm_keeps_the_dtype_of_its_weights() -> None:
    decoder = make_decoder().float()
    with torch.autocast("cpu", torch.bfloat16):
        out = decoder(random_states(2, 4).float(), memory=Memory(random_states(2, 5).float()))
    assert out.dtype == torch.float32


def test_mistakes_are_explained() -> None:
    decoder, x, memory = make_decoder(), random_states(1, 4), Memory(random_states(1, 5))
    packing = Packing.from_lengths([[2, 2]])
    with pytest.raises(ValueError, match="`packing` must be None for LSTMs"):
        decoder(x, packing=packing, memory=memory)
    with pytest.raises(ValueError, match="give `memory`"):
        decoder(x)
    with pytest.raises(ValueError, match="room for 3 tokens"):
        decoder(x[:, :3], cache=decoder.new_cache(2, memory=memory))
    with pytest.raises(ValueError, match="`input_feeding` must be false"):
        LSTMDecoderConfig(attention="none")
    with pytest.raises(ValueError, match="`width` must be even"):
        LSTMEncoderConfig(width=7)
    encoder = LSTMEncoder(LSTMEncoderConfig(width=WIDTH)).double()
    with pytest.raises(ValueError, match="a cache needs a causal stack"):
        encoder(x, cache=decoder.new_cache(2, memory=memory))


def test_initial_states_are_contiguous_as_cudnn_demands() -> None:
    decoder, seen = make_decoder(layers=2, attention="dot", input_feeding=False), []
    for block in decoder.blocks:
        block.lstm.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs[1]))
    decoder(random_states(3, 4), memory=Memory(random_states(3, 5), LENGTHS))
    assert len(seen) == 4
    assert all(state.is_contiguous() for state in seen)
