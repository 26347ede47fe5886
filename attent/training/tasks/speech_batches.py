"""Batches of recordings with speed perturbation and SpecAugment, and the loss on them: cross-entropy and CTC.

Speeds and masks are drawn on the host, as part of a batch; frames are computed and masked on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from attent.data import batch_plan
from attent.data.arrays import Array
from attent.data.audio import AudioDataConfig, RecordingDataset
from attent.data.batch_plan import BatchConfig, BatchPlan
from attent.data.loader import EpochCache, PrefetchLoader, RowLayout, TokenBatch
from attent.data.token_store import TokenSequences
from attent.models import Seq2Seq, Seq2SeqConfig, shift_right
from attent.nn import AudioConfig, LogMelSpectrogram, Memory
from attent.nn.frontends import HOP_SAMPLES, SAMPLE_RATE
from attent.nn.kernels.attention import DISABLE_CUDNN
from attent.training.objective import Objective
from attent.training.tasks.base import RowBatch

SAMPLE_SCALE = 32_768  # of the store's int16
FRAMES_PER_SECOND = SAMPLE_RATE // HOP_SAMPLES
TIME_MASK_SECONDS, FREQUENCY_MASK_BINS = 0.4, 27  # maximum widths of SpecAugment's masks
MAX_MASKED_TIME = 0.2  # of a recording, per masked span (p of SpecAugment's "switchboard mild")
SPEED_STREAM, MASK_STREAM = 11, 12  # random streams, part of the seed
NO_LIMIT = 2**31 - 1


def get_frontend(config: Seq2SeqConfig) -> AudioConfig:
    assert isinstance(config.frontend, AudioConfig)
    return config.frontend


def count_states(num_samples: Array, fixed_frames: int | None) -> Array:
    """Encoder states of recordings: one per 20 ms."""
    num_frames = -(-num_samples // HOP_SAMPLES)
    return (num_frames + 1) // 2 if fixed_frames is None else np.full_like(num_frames, fixed_frames // 2)


@dataclass(frozen=True)
class SpeechBatch(RowBatch):
    samples: Tensor  # (B, S)
    speeds: Tensor | None  # (B,) float64, 1.1: faster; None: all 1
    lengths: Tensor  # (B,) samples after the change of speed
    time_masks: Tensor  # (B, K, 2) masked frames: the first, and the one after the last
    frequency_masks: Tensor  # (B, K, 2) masked mel bins likewise
    target: TokenBatch
    num_samples: Array  # `lengths` on the host
    fixed_frames: int | None
    prefix_length: int = 0  # tokens before each text that are given, not predicted

    @property
    def num_targets(self) -> int:
        return self.target.num_tokens - len(self) * self.prefix_length

    @property
    def num_tokens(self) -> int:
        return int(count_states(self.num_samples, self.fixed_frames).sum()) + self.target.num_tokens

    @property
    def row_length(self) -> int:
        return max(int(count_states(self.num_samples, self.fixed_frames).max()), self.target.ids.shape[1])

    def slice_rows(self, start: int, stop: int) -> "SpeechBatch":
        rows = super().slice_rows(start, stop)
        # Recordings at most twice as fast have at most twice as many samples before the change of speed.
        width = int(rows.num_samples.max()) * (1 if self.speeds is None else 2)
        return replace(rows, samples=rows.samples[:, :width])


@dataclass(frozen=True)
class SpeechEpoch:
    plan: BatchPlan
    speeds: Array  # of each recording
    num_samples: Array  # of each recording at its speed


class SpeechLoader(PrefetchLoader[SpeechBatch]):
    """Batches of recordings of similar length, in a new order and at new speeds every epoch.

    `batch_tokens` counts encoder states (one per 20 ms) with padding; the target side gets proportionally less. Without
    a config: the same batches every time, without augmentation.
    """

    def __init__(
        self,
        recordings: RecordingDataset,
        targets: Sequence[Sequence[int]],
        pad_id: int,
        config: AudioDataConfig | None,
        *,
        batch_tokens: int,
        mel_bins: int,
        fixed_frames: int | None = None,
        prefix_length: int = 0,
        max_target_length: int | None = None,
        seed: int = 0,
    ) -> None:
        """Recordings with more than `max_target_length` tokens, the positions of a decoder, are dropped."""
        self.recordings, self.targets, self.pad_id = recordings, TokenSequences.from_rows(targets), pad_id
        self.config, self.batch_tokens, self.seed = config, batch_tokens, seed
        self.mel_bins, self.fixed_frames, self.prefix_length = mel_bins, fixed_frames, prefix_length
        self.max_target_length = max_target_length or NO_LIMIT
        self._get_epoch = EpochCache(self._build_epoch)

    def _build_epoch(self, epoch: int) -> SpeechEpoch:
        num_samples, count = self.recordings.num_samples, len(self.recordings)
        speeds, epoch_seed = np.ones(count), (self.seed, epoch if self.config else 0)
        if self.config:
            rng = np.random.default_rng((*epoch_seed, SPEED_STREAM))
            speeds = rng.choice(np.array(self.config.speed_perturbation, np.float64), count)
            if self.fixed_frames is not None:  # no recording may become longer than the model's window
                speeds[num_samples > speeds * (self.fixed_frames * HOP_SAMPLES)] = 1.0
        num_samples = np.ceil(num_samples / speeds).astype(np.int64)
        states, target_lengths = count_states(num_samples, self.fixed_frames), self.targets.lengths
        config = BatchConfig(batch_tokens=self.batch_tokens, max_tokens=self.batch_tokens, layout="bucketed")
        shape = batch_plan.compute_batch_shape(states, target_lengths, config)
        capacity = shape.row_capacity  # room for the longest recording, so that none is dropped
        capacity = replace(
            capacity,
            source=max(capacity.source, int(states.max())),
            target=max(capacity.target, int(target_lengths.max())),
        )
        limits = {"max_source_length": NO_LIMIT, "max_target_length": self.max_target_length}
        shape = replace(shape, row_capacity=capacity, **limits)
        order = batch_plan.draw_epoch_order([count], [1.0], *epoch_seed)
        plan = batch_plan.build_batch_plan(states, target_lengths, order, config, epoch_seed, shape)
        return SpeechEpoch(plan, speeds, num_samples)

    def num_batches(self, epoch: int) -> int:
        return len(self._get_epoch(epoch).plan)

    def describe_too_long(self, epoch: int = 0) -> str | None:
        ids = self._get_epoch(epoch).plan.too_long_pairs
        if not len(ids):
            return None
        example = self.recordings.texts[ids[0]]
        return (
            f"{len(ids):,} of {len(self.recordings):,} recordings have texts of more than {self.max_target_length:,} "
            f"tokens, the positions of the decoder, and are dropped (such as {example[:40]!r})"
        )

    def build_batch(self, epoch: int, batch_index: int) -> SpeechBatch:
        data = self._get_epoch(epoch)
        ids, rows = data.plan.get_batch(batch_index)
        samples = np.zeros((len(ids), int(self.recordings.num_samples[ids].max())), np.int16)
        for row, index in zip(samples, ids, strict=True):
            row[: self.recordings.num_samples[index]] = self.recordings.get_samples(index)
        num_samples = data.num_samples[ids]
        rng = np.random.default_rng((self.seed, epoch, batch_index, MASK_STREAM))
        time_masks, frequency_masks = self._draw_masks(num_samples, rng)
        layout = RowLayout.from_sequences(
            self.targets, ids, rows, (len(ids), None), pad_id=self.pad_id, max_length=NO_LIMIT
        )
        return SpeechBatch(
            samples=torch.from_numpy(samples),
            speeds=torch.from_numpy(data.speeds[ids]) if self.config else None,
            lengths=torch.from_numpy(num_samples),
            time_masks=torch.from_numpy(time_masks),
            frequency_masks=torch.from_numpy(frequency_masks),
            target=layout.to_batch(None),
            example_ids=ids,
            num_samples=num_samples,
            fixed_frames=self.fixed_frames,
            prefix_length=self.prefix_length,
        )

    def _draw_masks(self, num_samples: Array, rng: np.random.Generator) -> tuple[Array, Array]:
        config, num_frames = self.config, -(-num_samples // HOP_SAMPLES)
        if config is None:
            return (np.zeros((len(num_samples), 0, 2), np.int64),) * 2
        longest = np.minimum(TIME_MASK_SECONDS * FRAMES_PER_SECOND, MAX_MASKED_TIME * num_frames)
        widest = np.full(len(num_samples), min(FREQUENCY_MASK_BINS, self.mel_bins))
        return (
            draw_spans(config.time_masks, longest, num_frames, rng),
            draw_spans(config.frequency_masks, widest, np.full(len(num_samples), self.mel_bins), rng),
        )


def draw_spans(count: int, longest: Array, sizes: Array, rng: np.random.Generator) -> Array:
    """Draw `count` spans in each row, of 0 to `longest` of its `sizes` places: (B, count, 2)."""
    lengths = (rng.random((len(sizes), count)) * (longest[:, None] + 1)).astype(np.int64)
    lengths = np.minimum(lengths, sizes[:, None])
    starts = (rng.random((len(sizes), count)) * (sizes[:, None] - lengths + 1)).astype(np.int64)
    return np.stack([starts, starts + lengths], -1)


class SpeechObjective(Objective):
    """Label-smoothed cross-entropy of the decoder and, in training, `ctc` times the CTC loss of the encoder plus
    (1 - `ctc`) times the former (Watanabe et al. 2017)."""

    supports_cuda_graphs = False  # shapes differ, and the CTC loss reads its lengths on the host

    def __init__(
        self,
        model: Seq2Seq,
        *,
        smoothing: float = 0.0,
        rdrop: float = 0.0,
        compile: bool = False,  # noqa: A002
        ctc: float = 0.0,
    ) -> None:
        super().__init__(model, smoothing=smoothing, rdrop=rdrop, compile=compile)
        self.ctc = ctc
        self.log_mel = LogMelSpectrogram(get_frontend(model.config).mel_bins).to(next(model.parameters()).device)

    def compute_frames(self, batch: SpeechBatch) -> tuple[Tensor, Tensor | None]:
        """Log-mel frames with their masks, (B, T, M), and the frames of each row (None: all)."""
        samples = batch.samples.float() / SAMPLE_SCALE
        if batch.speeds is not None:
            samples = change_speed(samples, batch.speeds, int(batch.num_samples.max()))
        if batch.fixed_frames is None:
            frames, num_frames = self.log_mel(samples, batch.lengths)
            return mask_frames(frames, num_frames, batch), num_frames
        size = batch.fixed_frames * HOP_SAMPLES
        is_padding = torch.arange(samples.shape[1], device=samples.device) >= batch.lengths[:, None]
        samples = samples.masked_fill(is_padding, 0)[:, :size]
        frames, num_frames = self.log_mel(F.pad(samples, (0, size - samples.shape[1])))
        return mask_frames(frames, num_frames, batch), None

    def forward(self, batch: SpeechBatch) -> tuple[Tensor, Tensor]:
        target = batch.target
        with DISABLE_CUDNN:  # it plans each new shape again: 0.57 s per step instead of 0.09, measured on an H200
            memory = self.model.encode(*self.compute_frames(batch))
            states = self.model.decode(shift_right(target.ids, self.model.config.start_id), memory, target.lengths)
        mask = target.token_mask()
        mask[:, : batch.prefix_length] = False
        loss, plain = self.compute_token_loss(states, target.ids, mask)
        if self.ctc and self.training:
            loss = (1 - self.ctc) * loss + self.ctc * self.compute_ctc_loss(memory, batch)
        return loss, plain

    def compute_ctc_loss(self, memory: Memory, batch: SpeechBatch) -> Tensor:
        """Sum of the CTC losses (Graves et al. 2006); a text that is too long for its recording counts as 0."""
        target, prefix = batch.target, batch.prefix_length
        assert target.lengths is not None
        logits = self.model.ctc_output(memory.states)
        with torch.autocast(logits.device.type, enabled=False):
            log_probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1).transpose(0, 1)
            lengths = memory.lengths
            if lengths is None:
                lengths = target.lengths.new_full((len(batch),), len(log_probs))
            text_lengths = target.lengths - (prefix + 1)  # without the end token
            blank = self.model.config.start_id
            return F.ctc_loss(
                log_probs, target.ids[:, prefix:], lengths, text_lengths, blank, reduction="sum", zero_infinity=True
            )


def change_speed(samples: Tensor, speeds: Tensor, size: int) -> Tensor:
    """Play each row (B, S) at its speed, by linear interpolation: (B, size)."""
    last = samples.shape[1]
    samples = F.pad(samples, (0, 1))  # the last sample is followed by silence in every batch
    positions = torch.arange(size, device=samples.device, dtype=torch.float64) * speeds[:, None]
    lower = positions.long().clamp(max=last)
    fraction = (positions - lower).to(samples.dtype)
    return torch.lerp(samples.gather(1, lower), samples.gather(1, (lower + 1).clamp(max=last)), fraction)


def mask_frames(frames: Tensor, num_frames: Tensor, batch: SpeechBatch) -> Tensor:
    """Replace the masked frames and bins by the mean of the recording (SpecAugment, Park et al. 2019)."""
    is_masked = mark_spans(batch.time_masks, frames.shape[1])[:, :, None]
    is_masked = is_masked | mark_spans(batch.frequency_masks, frames.shape[2])[:, None]
    mean = frames.sum((1, 2)) / (num_frames * frames.shape[2])  # frames of padding are 0
    return torch.where(is_masked, mean[:, None, None], frames)


def mark_spans(spans: Tensor, size: int) -> Tensor:
    index = torch.arange(size, device=spans.device)
    return ((index >= spans[..., :1]) & (index < spans[..., 1:])).any(1)
