"""Would the tests notice? Each fault below is planted in a copy of the package, and tests are run on the copy.

    python tests/faults.py [part of a name ...]     a table: fault, and the test that caught it; exit 1 if one survives

Written as changes are: `-` is what stands in the code, and must stand there exactly once (when the code moves on, this
file says so), `+` is the fault. Each names the tests that ought to notice, so that all of them take some minutes only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELS = "tests/nn/kernels"

FAULTS = """
# causal off by one
@ nn/masks.py: laws/test_invariance.py -k future
- allowed & (k_at <= q_at)
+ allowed & (k_at <= q_at + 1)

# causal forgotten
@ nn/masks.py: laws/test_steps.py
- allowed = allowed & (k_at <= q_at)
+ pass

# padding ignored
@ nn/masks.py: laws/test_invariance.py -k padding
- allowed = allowed & (k < self.key_lengths[b])
+ pass

# padding off by one
@ nn/masks.py: laws/test_invariance.py -k padding
- k < self.key_lengths[b]
+ k <= self.key_lengths[b]

# lengths not passed on
@ nn/block.py: laws/test_invariance.py -k padding
- key_lengths=None if self.config.causal else lengths
+ key_lengths=None

# window off by one
@ nn/masks.py: laws/test_invariance.py -k noticed
- k_at >= q_at - before
+ k_at > q_at - before

# window not passed on
@ nn/block.py: laws/test_invariance.py -k noticed
-             window=self.config.window,
-             q_start
+             q_start

# packing ignored in self-attention
@ nn/block.py: laws/test_packing.py
- packing=None if packing is None else (packing, packing)
+ packing=None

# packing ignored across
@ nn/block.py: laws/test_packing.py
- return Mask(key_lengths=memory.lengths, packing=packings)
+ return Mask(key_lengths=memory.lengths)

# filler visible to filler
@ nn/masks.py: nn/test_masks.py
-  & (sentence >= 0)
+

# positions of packed text run on
@ nn/block.py: laws/test_packing.py
-         return packing.positions
+         return torch.arange(x.shape[1], device=x.device)

# is_causal where the square is none
@ nn/masks.py: laws/test_backends.py -k fused
-  and at_first and Tq == Tk
+

# shortcut forgets the start
@ nn/masks.py: laws/test_backends.py -k fused
- self.q_start >= Tk - 1
+ self.q_start >= 0

# bias forgotten in fused
@ nn/attend.py: laws/test_backends.py -k fused
- visible if bias is None else hide(bias.to(q.dtype), visible)
+ visible

# mask forgotten in fused with bias
@ nn/attend.py: laws/test_backends.py -k fused
- bias if visible is None else bias.masked_fill(~visible, float("-inf"))
+ bias

# bias forgotten in flex
@ nn/attend.py: laws/test_backends.py -k flex
- score_mod=add_bias
+ score_mod=None

# mask forgotten in flex
@ nn/attend.py: laws/test_backends.py -k flex
- block_mask=blocks
+ block_mask=None

# shared heads in the wrong order
@ nn/attend.py: nn/test_attend.py
- x.repeat_interleave(heads // x.shape[1], dim=1)
+ x.repeat(1, heads // x.shape[1], 1, 1)

# scale forgotten
@ nn/attend.py: nn/test_attend.py
- .to(torch.promote_types(q.dtype, torch.float32)) * scale
+ .to(torch.promote_types(q.dtype, torch.float32))

# scale of the model, not of the head
@ nn/attention.py: nn/test_oracles.py
- self.head_width**-0.5
+ width**-0.5

# a row that may see nothing sees everything
@ nn/attend.py: laws/test_backends.py -k explicit
- scores.softmax(-1).masked_fill(~visible, 0)
+ scores.softmax(-1)

# places restart in the cache
@ nn/block.py: laws/test_steps.py
- return at + (cache.place[:, None] if isinstance(cache.place, Tensor) else cache.place)
+ return at

# ragged rows share one place
@ nn/cache.py: laws/test_steps.py -k ragged
- return self.used if self.lengths is None else self.lengths
+ return self.used

# own cache not reordered
@ nn/cache.py: laws/test_steps.py -k beams
-         self.own.reorder(rows)
+         pass

# cross cache not reordered
@ nn/cache.py: laws/test_steps.py -k beams
-             self.cross.reorder(rows)
+             pass

# memory lengths not reordered
@ nn/cache.py: laws/test_steps.py -k beams
- self.lengths, self.memory_lengths, self.ancestors = (
+ self.lengths, _, self.ancestors = (

# lengths of rows not reordered
@ nn/cache.py: laws/test_steps.py -k beams
- self.lengths, self.memory_lengths, self.ancestors = (
+ _, self.memory_lengths, self.ancestors = (

# ancestors not reordered
@ nn/cache.py: laws/test_steps.py -k beams_of_one
- self.lengths, self.memory_lengths, self.ancestors = (
+ self.lengths, self.memory_lengths, _ = (

# beams do not follow one another
@ nn/cache.py: laws/test_steps.py -k beams_of_one
-             self.ancestors = self.ancestors.gather(1, beams[:, :, None].expand_as(self.ancestors))
+             pass

# a beam sees all beams of its row
@ nn/masks.py: laws/test_steps.py -k beams_of_one
- self.ancestors[b, q, k_at] == k % K
+ self.ancestors[b, q, k_at] >= 0

# beams side by side stand one behind the other
@ nn/block.py: laws/test_steps.py -k beams_of_one
-     at = at if cache.beams == 1 else torch.zeros_like(at)
+     at = at

# keys of beams are as far away as their columns
@ nn/block.py: laws/test_steps.py -k beams_of_one
- torch.arange(used + x.shape[1], device=x.device) // cache.beams
+ torch.arange(used + x.shape[1], device=x.device)

# a row that begins anew keeps its memory
@ nn/cache.py: laws/test_steps.py -k anew
-                 layer.cross.put(rows, other.cross)
+                 pass

# a row that begins anew keeps the length of its memory
@ nn/cache.py: laws/test_steps.py -k anew
-             self.memory_lengths = self.memory_lengths.index_copy(0, rows, new.memory_lengths)
+             pass

# rows that go on lose their place
@ nn/cache.py: laws/test_steps.py -k anew
- torch.tensor(places, device=device) * self.beams
+ torch.tensor(places, device=device)

# rows of a search found again where they were before
@ decode/lane.py: nn/kernels/test_steps.py -k come_first
- self.rows[size:] = -1
+ self.rows[size:] = self.rows[size:]

# a beam's last tokens are those of another
@ nn/kernels/steps.py: nn/kernels/test_steps.py -k closes
- (length - back) * K + beam
+ (length - 1 - back) * K + beam

# a loop is closed after all
@ nn/kernels/steps.py: nn/kernels/test_steps.py -k closes
- broken = (back < run)
+ broken = (back <= run)

# what is forbidden is still the best of its group
@ nn/kernels/steps.py: nn/kernels/test_steps.py -k closes
- mask=(near < V) & (near != end)
+ mask=(near < V) & (near < end)

# who may not go in circles is known from the last search
@ decode/lane.py: nn/kernels/test_steps.py -k circles
- self.no_loops[:S] = no_loops
+ self.no_loops[:S] |= no_loops

# a thread has the device out of its turn
@ decode/engine.py: decode/test_engine.py -k turn
- with self.turn or nullcontext():
+ with nullcontext():

# half of what has no room is left out
@ decode/lots.py: decode/test_lots.py
- waiting.extendleft((places[half:], places[:half]))
+ waiting.appendleft(places[:half])

# a lot knows sources in the order of their lengths
@ decode/lots.py: decode/test_lots.py
- memory[order] = begins
+ memory[:] = begins

# a clerk asks for a lane again and again
@ cli/clerks.py: cli/test_clerks.py -k lots
- self.without.add(search)
+ pass

# loops are forbidden from the start though the source has them
@ decode/translator.py: decode/test_translator.py -k from_the_start
- no_loops=guard and not looping(row)
+ no_loops=guard

# a clerk without what a line of its own asks for
@ cli/clerks.py: cli/test_clerks.py -k arrives
- more if any(more) else None
+ None

# rotary keys not turned
@ nn/attention.py: laws/test_invariance.py -k distance
- KV(keys if angles is None else angles.turn(keys), values)
+ KV(keys, values)

# rotary keys turned twice
@ nn/attention.py: laws/test_invariance.py -k distance
- angles.turn(keys), values)
+ angles.turn(angles.turn(keys)), values)

# rotary queries not turned
@ nn/attention.py: laws/test_invariance.py -k distance
- return q if angles is None else angles.turn(q)
+ return q

# post-norm in place of pre-norm
@ nn/block.py: nn/test_oracles.py
-         if self.pre:
+         if False:

# pre-norm in place of post-norm
@ nn/block.py: nn/test_oracles.py
-         if self.pre:
+         if True:

# no last norm
@ nn/block.py: nn/test_oracles.py
- self.output_dropout(self.norm(x))
+ self.output_dropout(x)

# dropout on in use
@ nn/block.py: laws/test_dropout.py
- x + self.dropout(sublayer(self.norm(x)))
+ x + nn.functional.dropout(sublayer(self.norm(x)), self.dropout.p)

# dropout of weights on in use
@ nn/attention.py: laws/test_dropout.py
- self.dropout if self.training else 0.0
+ self.dropout

# no dropout on embeddings
@ nn/block.py: laws/test_dropout.py
- self.dropout(self.embedding_norm(self.positions.embed(x, at, below)))
+ self.embedding_norm(self.positions.embed(x, at, below))

# dropout after the sum
@ nn/block.py: laws/test_dropout.py
- self.norm(x + self.dropout(sublayer(x)))
+ self.norm(self.dropout(x + sublayer(x)))

# the tap sees no mask
@ nn/attention.py: laws/test_tap.py
- explicit(q, k, v, self.mask, bias, self.scale)
+ explicit(q, k, v, Mask(), bias, self.scale)

# the tap sees no bias
@ nn/attention.py: laws/test_tap.py
- explicit(q, k, v, self.mask, bias, self.scale)
+ explicit(q, k, v, self.mask, None, self.scale)

# a tapped head looks with another's keys
@ nn/attention.py: look/test_trace.py
- keys = [head // shared for head in heads]
+ keys = [0 for head in heads]

# silence forgets the bias
@ look/silence.py: look/test_silence.py
- if linear.bias is not None:
+ if False:

# silence is not taken back
@ look/silence.py: look/test_silence.py
- view.copy_(values)
+ pass

# the film counts ends that were dropped
@ decode/film.py: decode/test_film.py
- ends = token == plan.end and rank < plan.beams
+ ends = token == plan.end

# the film lets rules write into the search's numbers
@ decode/film.py: look/test_view.py
- looked_at(beams, logits.clone(), plan)
+ looked_at(beams, logits, plan)

# what is no word has a share in the page's probabilities
@ look/view.py: look/test_view.py
- logits.index_fill(-1, never, -math.inf).log_softmax(-1).cpu()
+ logits.log_softmax(-1).cpu()

# the page does not look again where translating does
@ look/view.py: look/test_view.py
- if looping(seen.found[0].ids) and not looping(job.source):
+ if False:

# a page may fetch what it likes
@ look/html.py: look/test_html.py
- default-src 'none'; script-src
+ default-src *; script-src

# of a long text the wrong weights are kept
@ look/trace.py: look/test_trace.py
- greatest = weights.topk(most, -1)
+ greatest = weights.topk(most, -1, largest=False)

# a pruned head takes its neighbour along
@ models/heads.py: look/test_prune.py
- [head * width + i for head in heads for i in range(width)]
+ [head * width + i for head in heads for i in range(width - 1)]

# a head late by a step is drawn by the wrong words
@ cli/looking.py: cli/test_look.py
- return document | {"layers": layers}
+ return document

# embedding not scaled
@ models/embedding.py: models/test_figure.py
- width**0.5 if scaled else 1.0
+ 1.0

# target not shifted
@ models/seq2seq.py: models/test_figure.py
- F.pad(target, (1, 0), value=start)[:, :-1]
+ target

# the encoder's lengths are lost
@ models/seq2seq.py: laws/test_seq2seq.py -k padding
- return Memory(states, lengths, packing)
+ return Memory(states, None, packing)

# source and target packing swapped
@ models/seq2seq.py: laws/test_seq2seq.py -k packed
- source_packing, target_packing = packing or (None, None)
+ target_packing, source_packing = packing or (None, None)

# ties not restored
@ models/store.py: laws/test_seq2seq.py -k saved
-         setattr(model.get_submodule(module), leaf, model.get_parameter(first))
+         pass

# greedy writes on behind the end
@ decode/search.py: laws/test_seq2seq.py -k greedy
- .masked_fill(finished, end)
+

# sinusoids in float32
@ nn/positions.py: nn/test_positions.py
- else torch.float64
+ else torch.float32

# buckets of both ways in a decoder
@ nn/positions.py: nn/test_positions.py
- bucket_of(distance, self.buckets, self.reach, self.causal)
+ bucket_of(distance, self.buckets, self.reach, False)

# data: sides out of step after a bad line
@ data/readers/moses.py: data/test_readers_lines.py
-             assert isinstance(bad, Bad)
+             next(right, None)

# data: the last row of a file without a newline lost
@ data/readers/files.py: data/test_readers_lines.py
-     if rest:
-         yield rest
+     pass

# data: a batch over its room
@ data/packing.py: data/test_batches.py
- (left[1] >= needs[1][:, None])
+ (left[1] >= needs[1][:, None] - 1)

# data: flat rows one too full
@ data/packing.py: data/test_batches.py
- target_used + room.target, "right"
+ target_used + room.target + 1, "right"

# data: ranks take the same batches
@ data/batches.py: data/test_batches.py -k ranks
- epoch.plan.batch(step * self.ranks + self.rank)
+ epoch.plan.batch(step * self.ranks)

# data: the last batch of an epoch lost
@ data/batches.py: data/test_batches.py -k partition
- return -(-len(self.epoch(epoch).plan) // self.ranks)
+ return len(self.epoch(epoch).plan) // self.ranks

# data: every epoch in the same order
@ data/plan.py: data/test_batches.py -k epoch
- pairs[mixed(len(pairs), (seed, epoch, IN_PAIRS))]
+ pairs[mixed(len(pairs), (seed, 0, IN_PAIRS))]

# data: too long is cut where it should be dropped
@ data/plan.py: data/test_batches.py
- if config.too_long == "drop":
+ if config.too_long == "cut":

# data: sentences of one row mixed up
@ data/batches.py: data/test_batches.py
- np.arange(len(self.row)) - np.searchsorted(self.row, self.row)
+ np.arange(len(self.row)) * 0

# data: a padded batch over its budget
@ data/plan.py: data/test_batches.py -k budget
- (count * source_width <= room.source) & (count * target_width <= room.target)
+ (count * source_width <= room.source)

# data: the key forgets the filters
@ data/store.py: data/test_store.py -k key
-         "filters": settings.to_dict(recipe.filters),
+

# data: a half store is taken for a whole one
@ data/store.py: data/test_store.py -k damaged
-     if size != wanted:
+     if False:

# data: duplicates stay
@ data/store.py: data/test_store.py
- return block if new.all() else block.where(new)
+ return block

# data: places of dropped pairs slip
@ data/encode.py: data/test_store.py
-             places = list(compress(places, kept))
+             places = places[: sum(kept)]

# data: sampling the same in every epoch
@ data/encode.py: data/test_store.py -k sampling
- seed = _hashed((*self.recipe.draw, number), 3)
+ seed = _hashed((self.recipe.draw[0], number), 3)

# text: words of another text's end
@ text/bulk.py: text/test_bulk.py
- texts = [text or NOTHING for text in
+ texts = [text for text in

# text: a tag stays for the next call
@ text/bulk.py: text/test_bulk.py
- self._ids[self._starts[self._tag]] = tag or 0
+ pass

# train: the learning rate falls too fast
@ train/schedule.py: train/test_schedule.py
- math.sqrt(max(1, warmup) / step)
+ max(1, warmup) / step

# train: smoothing forgotten in the gradient
@ train/loss.py: train/test_loss.py
- grad.new_full((), (facts.smoothing - 1) / passes)
+ grad.new_full((), -1 / passes)

# train: a process without a piece counts one twice
@ train/pieces.py: train/test_pieces.py
- pieces[0].stop, 0.0)
+ pieces[0].stop, 1.0)

# train: half a gradient stays after running out of memory
@ train/loop.py: train/test_loop.py -k memory
-             self.optimiser.zero_grad()  # here, where the failed pass no longer holds its memory
+             pass

# train: a gradient that is not finite is followed
@ train/optimiser.py: train/test_optimiser.py train/test_loop.py
- part.found_inf, part.grad_scale = found_inf, None
+ part.grad_scale = None

# train: the place in the epoch is not kept
@ train/loop.py: train/test_loop.py
- self.marks.epoch, self.marks.at = after
+ self.marks.epoch = after.epoch

# train: the optimiser is not restored
@ train/loop.py: train/test_loop.py
-         self.optimiser.fill(found.tensors["optimizer"])
+         pass

# train: the worst is the best
@ train/loop.py: train/test_loop.py
- return (metric, -loss) > (self.marks.best, -self.marks.best_loss)
+ return (metric, -loss) < (self.marks.best, -self.marks.best_loss)

# train: the running mean runs backwards
@ train/loop.py: train/test_loop.py
- for p in self.learning.values()], 1 - decay)
+ for p in self.learning.values()], decay)

# train: LoRA does not begin as the model itself
@ train/lora.py: train/test_lora.py -k begin
- self.up = nn.Parameter(torch.zeros(rows, rank))
+ self.up = nn.Parameter(torch.ones(rows, rank))

# train: a mean that is a sum
@ train/means.py: train/test_means.py
- (tensor / count).to(dtypes[name])
+ tensor.to(dtypes[name])

# train: a damaged checkpoint is taken
@ train/checkpoint.py: train/test_checkpoint.py -k flip
- disk.damage(
+ (lambda *_: None)(

# decode: no penalty for length
@ decode/search.py: decode/test_search.py laws/test_search.py
- return (exact.clamp(min=1) ** self.search.length_penalty).float()
+ return torch.ones_like(lengths).float()

# decode: the end does not count
@ decode/search.py: decode/test_search.py
- return Pool(along(beams.tokens, parents), sums, sums / plan.penalty(lengths), lengths)
+ return Pool(along(beams.tokens, parents), sums, sums / plan.penalty(lengths - 1), lengths)

# decode: an end is taken behind the first K
@ decode/search.py: decode/test_search.py -k plain_search
- ends = parents[:, :K], sums[:, :K].masked_fill(~is_end[:, :K], NEVER)
+ ends = parents, sums.masked_fill(~is_end, NEVER)

# decode: stops too early
@ decode/search.py: decode/test_search.py -k stopping
- sums.amax(1) / plan.penalty(limits)
+ sums.amax(1) / plan.penalty(lengths)

# decode: patience for one more
@ decode/search.py: decode/test_search.py -k patient
- count >= round(plan.search.patience * plan.beams)
+ count > round(plan.search.patience * plan.beams)

# decode: what is done finds more
@ decode/search.py: decode/test_search.py -k patient
- ends[1].masked_fill(beams.done[:, None], NEVER)
+ ends[1]

# decode: of equally good ones the later is kept
@ decode/search.py: decode/test_search.py -k equally_good
- torch.cat([getattr(self, f.name), getattr(other, f.name)], 1) for f
+ torch.cat([getattr(other, f.name), getattr(self, f.name)], 1) for f

# decode: of equal ones the last
@ decode/search.py: decode/test_search.py
- (order * PLACES - place)
+ (order * PLACES + place)

# decode: chunks of a vocabulary in the order of their best
@ decode/search.py: decode/test_search.py -k likeliest
- first(chunks.amax(-1), n).sort(-1).values
+ first(chunks.amax(-1), n)

# decode: what was cut is ranked among what has ended
@ decode/search.py: decode/test_search.py -k cut
- both.of(there.argsort(dim=1, descending=True, stable=True)[:, : plan.search.n_best])
+ both.of(first(both.scores, plan.search.n_best))

# decode: every source has the limit of the longest
@ decode/search.py: decode/test_engine.py
- torch.tensor([job.limit for job in jobs], device=device)
+ torch.tensor([capacity for job in jobs], device=device)

# decode: what a rule remembers stays with the beam
@ decode/search.py: decode/test_translator.py -k demanded
- moved = along(memory, found.parents) if plan.moves else memory
+ moved = memory

# decode: groups find one text twice
@ decode/search.py: decode/test_engine.py -k groups
- both.distinct() if plan.groups > 1 else both
+ both

# decode: what a group pays stays in its sums
@ decode/search.py: decode/test_engine.py -k groups
- one.sums + paid
+ one.sums

# decode: chance depends on the neighbours
@ decode/draw.py: decode/test_engine.py -k chance
- mixed(rows + mixed(torch.full_like(rows, sampling.seed)))
+ mixed(torch.arange(rows.numel()).view_as(rows) + mixed(torch.full_like(rows, sampling.seed)))

# decode: every place draws the same
@ decode/draw.py: decode/test_draw.py
-  + places[:, None])
+ )

# decode: chance without bounds
@ decode/draw.py: decode/test_draw.py -k chance
- BITS = 23
+ BITS = 24

# decode: one too few are likely enough
@ decode/draw.py: decode/test_draw.py -k top_p
- chances.cumsum(-1) - chances >= sampling.top_p
+ chances.cumsum(-1) >= sampling.top_p

# decode: a source comes into another's place
@ decode/engine.py: decode/test_engine.py -k refilled
- torch.tensor(free[: len(next_ones)], device=self.engine.device)
+ torch.tensor(free[: len(next_ones)][::-1], device=self.engine.device)

# decode: a row that is filled again goes on where the last one ended
@ decode/engine.py: decode/test_engine.py -k refilled
-         self.beams = self.beams.put(rows, beams)
-         self._rewind()
+         self.beams = self.beams.put(rows, beams)

# decode: translations change places
@ decode/engine.py: decode/test_engine.py -k refilled
- rows = zip(over, *(
+ rows = zip(reversed(over), *(

# decode: the prefix is not forced
@ decode/rules.py: decode/test_translator.py -k prefix
- return self.table[state[:, 0], at]
+ return self.table[state[:, 0], at] * 0 - 1

# decode: a stream gives what one beam alone says
@ decode/translator.py: decode/test_translator.py -k stream
-         if len(set(column)) > 1:
+         if False:

# decode: parts of a text lose what stood between them
@ decode/translator.py: decode/test_translator.py -k gaps
- Piece(one.text, piece.gap) for
+ Piece(one.text, " ") for

# family: ragged prompts are read as if all were long
@ models/causal.py: laws/test_family.py -k ragged
- self.decoder(self.embedding(ids), lengths, cache=cache)
+ self.decoder(self.embedding(ids), cache=cache)

# family: packing ignored by a decoder alone
@ models/causal.py: laws/test_family.py -k packed
- self.decoder(self.embedding(ids), lengths, packing=packing)
+ self.decoder(self.embedding(ids), lengths)

# family: beams without room of their own
@ models/causal.py: decode/test_generator.py -k beams_go_on
- rows=rows, beams=beams)
+ rows=rows)

# family: the output tied whatever the config says
@ models/causal.py: models/test_sizes.py
- tied_to = self.embedding if config.tie_output else None
+ tied_to = self.embedding

# family: segments forgotten
@ models/encoder.py: interop/test_bert.py -k theirs
- torch.zeros_like(ids) if segments is None else segments
+ torch.zeros_like(ids)

# family: padding looked at by an encoder alone
@ models/encoder.py: laws/test_family.py -k padding
- return self.encoder(x, lengths, packing=packing)
+ return self.encoder(x, packing=packing)

# family: packed texts judged by the first token of the next
@ models/encoder.py: laws/test_family.py -k classified
- F.pad(packing.ends, (1, 0))[:, :-1].clamp
+ packing.ends.clamp

# family: the last token stands for a text
@ models/encoder.py: interop/test_bert.py -k theirs
- first = states[:, 0] if
+ first = states[:, -1] if

# family: the head for masked words has no activation
@ models/encoder.py: interop/test_bert.py -k theirs
- ACTIVATIONS[self.activation](self.dense(states))
+ self.dense(states)

# family: the class token stands last
@ models/vision.py: interop/test_vit.py -k theirs
- [self.class_token.expand(len(x), 1, -1).to(x.dtype), x]
+ [x, self.class_token.expand(len(x), 1, -1).to(x.dtype)]

# family: the class token among the patches of a mean
@ models/vision.py: laws/test_family.py -k mean
- states[:, int(self.config.class_token) :].mean(1)
+ states.mean(1)

# family: patches column by column
@ models/vision.py: laws/test_family.py -k patches
- permute(0, 2, 3, 1, 4, 5)
+ permute(0, 3, 2, 1, 4, 5)

# family: numbers from 0 to 1 divided like bytes
@ models/vision.py: laws/test_family.py -k bytes
- / (255 if pixels.dtype == torch.uint8 else 1)
+ / 255

# positions: scaling not passed on
@ nn/positions.py: interop/test_llama.py -k theirs
- self.scaling = config.scaling
+ self.scaling = None

# positions: the way over runs backwards
@ nn/positions.py: interop/test_llama.py -k theirs
- (1 - share) * speed / scaling.factor + share * speed
+ share * speed / scaling.factor + (1 - share) * speed

# block: layers counted from 0 where scores are divided by them
@ nn/block.py: interop/test_gpt2.py -k theirs
- / (layer + 1)
+ / max(1, layer)

# block: embeddings normed before they have positions
@ nn/block.py: interop/test_bert.py -k theirs
- self.embedding_norm(self.positions.embed(x, at, below))
+ self.positions.embed(self.embedding_norm(x), at, below)

# block: no dropout on what a stack gives
@ nn/block.py: laws/test_family.py -k last_dropout
- return self.output_dropout(self.norm(x))
+ return self.norm(x)

# block: embeddings dropped at the rate of all else
@ nn/block.py: laws/test_family.py -k last_dropout
- Dropout(config.dropout if config.embedding_dropout is None else config.embedding_dropout)
+ Dropout(config.dropout)

# interop: tied tensors not compared
@ interop/table.py: interop/test_refusals.py -k tied
- if first.shape != stored[name].shape or not torch.equal(first.read(), stored[name].read()):
+ if first.shape != stored[name].shape:

# interop: true is 1
@ interop/table.py: interop/test_refusals.py
-  and isinstance(value, bool) == isinstance(wanted, bool)
+

# interop: config.json knows the ends better
@ interop/table.py: interop/test_gpt2.py -k generation
- if key in keys.overruled or data.get(key) is None
+ if data.get(key) is None

# interop: two precisions in one model
@ interop/table.py: interop/test_refusals.py -k precisions
- (wanted is None and tensor.dtype != first.dtype)
+ False

# interop: a shard may lie anywhere
@ interop/files.py: interop/test_refusals.py -k elsewhere
- safetensors", name):
+ safetensors", Path(name).name):

# interop: only the last shard counts
@ interop/files.py: interop/test_gpt2.py -k shards
- tensors |= check_shard(
+ tensors = check_shard(

# gpt2: keys and values change places
@ interop/gpt2.py: interop/test_gpt2.py -k theirs
- "decoder.blocks.{i}.self_attn.key", "decoder.blocks.{i}.self_attn.value")
+ "decoder.blocks.{i}.self_attn.value", "decoder.blocks.{i}.self_attn.key")

# gpt2: a square matrix not turned
@ interop/gpt2.py: interop/test_gpt2.py -k theirs
- "transformer.h.{i}.attn.c_proj", TRANSPOSED)
+ "transformer.h.{i}.attn.c_proj")

# gpt2: a width that is left out is that of the model
@ interop/gpt2.py: interop/test_gpt2.py
- inner=4 * facts.n_embd if
+ inner=facts.n_embd if

# llama: the gate and what it opens change places
@ interop/llama.py: interop/test_llama.py -k theirs
- feedforward.expand", "model.layers.{i}.mlp.gate_proj"),  # the one with the activation
-     Row("decoder.blocks.{i}.feedforward.gate", "model.layers.{i}.mlp.up_proj"),
+ feedforward.gate", "model.layers.{i}.mlp.gate_proj"),
+     Row("decoder.blocks.{i}.feedforward.expand", "model.layers.{i}.mlp.up_proj"),

# llama: the base beside the table goes before the one inside
@ interop/llama.py: interop/test_llama.py -k spelling
- (rope.rope_theta, facts.rope_theta)
+ (facts.rope_theta, rope.rope_theta)

# bert: beta read as gamma
@ interop/bert.py: interop/test_bert.py -k 2019
- {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}
+ {".LayerNorm.beta": ".LayerNorm.weight", ".LayerNorm.gamma": ".LayerNorm.bias"}

# bert: labels in the order of the file
@ interop/encoders.py: interop/test_bert.py -k labels
- [str(names[str(i)]) for i in range(count)]
+ [str(name) for name in names.values()]

# bert: the usual epsilon where none is told
@ interop/bert.py: interop/test_defaults.py
- layer_norm_eps: float = 1e-12
+ layer_norm_eps: float = 1e-5

# vit: bytes that are not scaled count as scaled
@ interop/vit.py: interop/test_vit.py -k pixels
- std=(1 / ours,))
+ std=(1.0,))

# t5: the gate and what it opens change places in the decoder
@ interop/t5.py: interop/test_t5.py -k theirs
- Row("decoder.blocks.{i}.feedforward.expand", "decoder.block.{i}.layer.2.DenseReluDense.wi_0"),
-     Row("decoder.blocks.{i}.feedforward.gate", "decoder.block.{i}.layer.2.DenseReluDense.wi_1"),
+ Row("decoder.blocks.{i}.feedforward.gate", "decoder.block.{i}.layer.2.DenseReluDense.wi_0"),
+     Row("decoder.blocks.{i}.feedforward.expand", "decoder.block.{i}.layer.2.DenseReluDense.wi_1"),

# t5: mt5 scaled as t5 is
@ interop/t5.py: interop/test_t5.py -k mt5
- return told and self.model_type == "t5"
+ return told

# t5: no dropout on what its stacks give
@ interop/t5.py: interop/test_t5.py -k presets
-         output_dropout=facts.dropout_rate,
-         attention_dropout
+         attention_dropout

# rows: the last token of a text is read too
@ data/rows.py: data/test_rows.py -k windows
- np.repeat(edges[1:] - 1, counts)
+ np.repeat(edges[1:], counts)

# rows: the first word of the next document is to be told
@ data/rows.py: data/test_rows.py -k windows
- wanted[document != of_next] = NOTHING
+ pass

# rows: places are counted from the beginning of the window
@ data/rows.py: data/test_rows.py -k documents
- begins = np.maximum(self.documents.offsets[document], starts[:, None])
+ begins = starts[:, None]

# rows: every epoch is cut at the same places
@ data/rows.py: data/test_rows.py -k elsewhere
- (self.seed, epoch, IN_OFFSET)
+ (self.seed, 0, IN_OFFSET)

# rows: the frame of a text is hidden
@ data/rows.py: data/test_rows.py -k bert
- laid.column + self.before, inner
+ laid.column, inner

# rows: what is not masked is always another word
@ data/rows.py: data/test_rows.py -k bert
- (share >= MASKED) & (share < MASKED + OTHER)
+ share >= MASKED

# rows: each epoch hides the same words
@ data/rows.py: data/test_rows.py -k hides
- (self.seed, 0 if self.fixed else epoch, step, IN_MASKS)
+ (self.seed, step, IN_MASKS)

# rows: labels in the order of the batch
@ data/rows.py: data/test_rows.py -k label
- self.of_text[pairs]
+ self.of_text[: len(pairs)]

# rows: filler counts as told
@ data/rows.py: data/test_rows.py
- int((wanted >= 0).sum())
+ wanted.numel()

# rows: places are those of the first row
@ train/objective.py: train/test_tasks.py -k hidden
- batch.places[..., None].expand(-1, -1, states.shape[2])
+ batch.places[:1, :, None].expand(len(states), -1, states.shape[2])

# spans: as many are taken out in every epoch
@ data/spans.py: data/test_rows.py -k spans
- (self.seed, epoch, IN_SPANS)
+ (self.seed, 0, IN_SPANS)

# spans: more of them than sentinels
@ data/spans.py: data/test_rows.py -k span
- np.clip(np.rint(noise / MEAN).astype(np.int64), 1, most)
+ np.maximum(np.rint(noise / MEAN).astype(np.int64), 1)

# texts: the column of names is a text
@ data/labels.py: data/test_texts.py
- head, rows = rows[0], rows[1:]
+ head = rows[0]

# texts: copies of what is held out are learned
@ data/texts.py: data/test_texts.py
- groups.setdefault(text, [])
+ groups.setdefault(str(i), [])

# texts: labels of others are held out
@ data/texts.py: data/test_texts.py
- [texts.labels[i] for i in places]
+ texts.labels[: len(places)]

# texts: more than a tenth of a short text is held out
@ data/texts.py: data/test_texts.py
- size = min(whole - int(whole * 0.9), HELD_CHARACTERS)
+ size = max(whole - int(whole * 0.9), HELD_CHARACTERS)

# pictures: rows and columns change places
@ data/images.py: data/test_images.py
- pixels.transpose(2, 0, 1)
+ pixels.transpose(2, 1, 0)

# pictures: a class may be held out whole
@ data/images.py: data/test_images.py
- len(own) - 1)
+ len(own))

# pictures: mirrored upside down
@ train/images.py: train/test_images.py -k mirrored
- pixels[turn][..., ::-1]
+ pixels[turn][..., ::-1, :]

# pictures: the plain loss is smoothed
@ train/images.py: train/test_images.py -k shares
- mixed(logits.detach(), batch, 0.0)
+ mixed(logits.detach(), batch, self.smoothing)

# pictures: every epoch in one order
@ train/images.py: train/test_images.py -k epoch
- default_rng((self.seed, epoch)).permutation
+ default_rng(self.seed).permutation

# pictures: judged with dropout
@ train/images.py: train/test_images.py -k judge
-     model.eval()
+     pass

# tasks: documents do not end
@ train/language.py: cli/test_train_tasks.py -k bits
- self.vocabulary.before, (self.vocabulary.end,))
+ self.vocabulary.before, ())

# tasks: bits by token told as bits by character
@ train/language.py: cli/test_train_tasks.py -k bits
- bits / max(1, texts.characters)
+ bits / max(1, units)

# tasks: the share of hidden words counts filler
@ train/masked.py: train/test_tasks.py -k share
- units += batch.units
+ units += batch.wanted.numel()

# tasks: a mask may stand for another word
@ train/masked.py: train/test_tasks.py -k words
- other_words(vocabulary.size, specials)
+ other_words(vocabulary.size, ())

# tasks: labels said are those of other texts
@ train/labelled.py: train/test_tasks.py -k label
- zip(batch.pairs, model.classify
+ zip(range(len(batch.pairs)), model.classify

# tasks: too sure of a share
@ train/labelled.py: train/test_tasks.py -k interval
- z * z / (2 * count)
+ z / (2 * count)

# positions: a table for packed rows is one short
@ nn/positions.py: laws/test_packing.py
- table = self.table if known else sinusoid(torch.arange(below,
+ table = self.table if known else sinusoid(torch.arange(1, below + 1,

# tiles: keys see earlier queries
@ nn/kernels/tiles.py: nn/kernels/test_tiles.py -k equation
- rows[None, :] >= columns[:, None]
+ rows[None, :] <= columns[:, None]

# tiles: a tile begins at its second sentence
@ nn/kernels/tiles.py: nn/kernels/test_tiles.py -k equation
- low = tl.load(ends + first - 1, mask=(first > 0)
+ low = tl.load(ends + first, mask=(first > 0)

# tiles: other sentences are seen
@ nn/kernels/tiles.py: nn/kernels/test_tiles.py -k equation
-         scores = tl.where(seen, scores, float("-inf"))
+         scores = tl.where(there[None, :], scores, float("-inf"))

# tiles: the gradient of a softmax is that of an exponential
@ nn/kernels/tiles.py: nn/kernels/test_tiles.py -k equation
- of_scores = shares * (of_shares - centre[None, :])
+ of_scores = shares * of_shares

# tiles: values learn from what was dropped
@ nn/kernels/tiles.py: nn/kernels/test_tiles.py -k dropout
- dropped = tl.where(keeps, shares / (1 - rate), 0.0)
+ dropped = shares

# tiles: filler is not written
@ nn/kernels/tiles.py: nn/kernels/test_tiles.py -k written
- tl.store(Out + place, out.to(Out.dtype.element_ty), mask=inside[:, None])
+ tl.store(Out + place, out.to(Out.dtype.element_ty), mask=(mine >= 0)[:, None])

# add and norm: the mean has no gradient
@ nn/kernels/add_norm.py: nn/kernels/test_passes.py -k norm
- of_total -= (tl.sum(grad, 1) / width)[:, None]
+ of_total -= 0.0

# add and norm: backward draws anew
@ nn/kernels/add_norm.py: nn/kernels/test_passes.py -k drops
- of_y = tl.where(kept(Seeds, place, rate)
+ of_y = tl.where(kept(Seeds, place + 1, rate)

# add and norm: the bias learns from what was dropped
@ nn/kernels/add_norm.py: nn/kernels/test_passes.py -k drops
- of_lacking += of_y
+ of_lacking += of_total

# add and norm: the last rows are not summed
@ nn/kernels/sums.py: nn/kernels/test_passes.py -k relu
- for start in range(0, N, ROWS):
+ for start in range(0, N - 1, ROWS):

# relu: what is below zero learns
@ nn/kernels/relu.py: nn/kernels/test_passes.py -k relu
- tl.where(out > 0, grad, 0.0)
+ tl.where(out >= 0, grad, 0.0)

# chance: one seed is not used
@ nn/kernels/chance.py: nn/kernels/test_passes.py -k chance
- (drawn >> 16) ^ second)
+ (drawn >> 16))

# loss: gpus do not smooth
@ nn/kernels/loss.py: nn/kernels/test_passes.py -k loss
- share = smoothing / words
+ share = 0.0

# loss: gpus learn from filler
@ nn/kernels/loss.py: nn/kernels/test_passes.py -k loss
- p = tl.where((at < words) & real, p, 0.0)
+ p = tl.where(at < words, p, 0.0)

# loss: rows that fill up the matrix are words
@ nn/kernels/loss.py: nn/kernels/test_passes.py -k loss
- p = tl.where((at < words) & real, p, 0.0)
+ p = tl.where(real, p, 0.0)

# flow: who is done goes on counting
@ decode/flow.py: decode/test_generator.py
- counts = texts.counts + ~texts.done
+ counts = texts.counts + 1

# flow: the end is part of a text
@ decode/flow.py: decode/test_generator.py -k again
- tuple(tokens[: count - ended])
+ tuple(tokens[:count])

# flow: only the first of several ends counts
@ decode/flow.py: decode/test_generator.py -k again
- ended = (token[:, None] == plan.ends).any(-1)
+ ended = token == plan.ends[0]

# flow: chance depends on the place in the batch
@ decode/flow.py: decode/test_generator.py -k alone
- texts.numbers[:, None], texts.counts)[:, 0]
+ torch.arange(len(logits))[:, None], texts.counts)[:, 0]

# flow: the place of a prompt on a desk is one too far
@ decode/flow.py: decode/test_generator.py -k stays
- torch.tensor([len(prompt.ids) - 1 for
+ torch.tensor([len(prompt.ids) for

# flow: rows cleared away leave their texts behind
@ decode/flow.py: decode/test_generator.py
-         self.texts = self.texts.of(kept)
-         self.cache.reorder(kept)
+         self.texts = self.texts.of(kept)

# generator: prompts in parts draw the same
@ decode/generator.py: decode/test_generator.py -k samples
- number=chance(asked.seed, first + place, sample)
+ number=chance(asked.seed, place, sample)

# generator: rows without a piece are written
@ decode/generator.py: decode/test_generator.py
- never=self._never,
-             sampling
+ sampling

# spool: half a character is given
@ decode/spool.py: decode/test_spool.py
- if not text or text.endswith(UNSURE):
+ if not text:

# spool: the word that is complete last
@ decode/spool.py: decode/test_spool.py
- min(found)[1]
+ max(found)[1]

# spool: spaces lost between tokens
@ decode/spool.py: decode/test_spool.py
- self.context, self.waiting = self.waiting or self.context, []
+ self.context, self.waiting = [], []

# prompts: short ones are read with their filler
@ decode/prompts.py: decode/test_generator.py -k company
- None if min(places) == width else torch.tensor(places, device=device)
+ None

# prompts: of several ends the likeliest counts alone
@ decode/prompts.py: decode/test_generator.py -k beams_go_on
- index_select(-1, self.ends).logsumexp(-1, keepdim=True)
+ index_select(-1, self.ends).amax(-1, keepdim=True)

# prompts: another prompt is as long as the one before
@ decode/prompts.py: decode/test_generator.py -k place_of_another
-             self.prompts[row] = count
+             pass

# reader: filler in the mean of a text
@ decode/reader.py: decode/test_reader.py -k vectors
- (states * real[..., None]).sum(1) / lengths
+ states.mean(1)

# reader: the second text of the first kind
@ decode/reader.py: decode/test_reader.py -k classified_as
- kinds = tuple(kind for kind, part
+ kinds = tuple(0 for kind, part

# reader: a mask is filled with a mask
@ decode/reader.py: decode/test_reader.py -k frame
- *mask, *of.sentinels,
+ *of.sentinels,

# reader: the shorter of two texts is cut
@ decode/reader.py: decode/test_reader.py
- first if len(first) > len(second) else second
+ first if len(first) < len(second) else second

# look: what was expected of the token itself
@ look/texts.py: look/test_texts.py -k expected
- [*ids[1:], None]
+ list(ids)

# look: the first words are guessed, not the hidden ones
@ look/texts.py: look/test_texts.py -k in_turn
- states[range(len(some)), some]
+ states[range(len(some)), range(len(some))]

# look: both texts of one segment
@ look/texts.py: look/test_texts.py -k segment
- segments += [number] *
+ segments += [0] *

# look: pictures of an idx file counted from 1
@ look/images.py: look/test_images.py -k idx
- left = int(number)
+ left = int(number) - 1
"""


@dataclass(frozen=True)
class Fault:
    name: str
    file: Path  # in attent/
    tests: list[str]  # arguments of pytest
    old: str
    new: str

    @classmethod
    def read(cls, text: str) -> Fault:
        name, where, *lines = text.splitlines()
        file, _, tests = where.removeprefix("@ ").partition(": ")
        old, new = ("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+")
        return cls(name.removeprefix("# "), Path(file), tests.split(), old, new)

    def plant(self, package: Path) -> None:
        path = package / self.file
        code = path.read_text()
        if code.count(self.old) != 1:
            found = code.count(self.old)
            sys.exit(f"fault `{self.name}`: its text must stand once in attent/{self.file}, but does {found} times")
        path.write_text(code.replace(self.old, self.new))


def caught_by(fault: Fault, scratch: Path) -> str | None:
    """The first test that fails on a copy with the fault; None if all pass."""
    shutil.copytree(ROOT / "attent", scratch / "attent", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests", scratch / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", scratch)
    fault.plant(scratch / "attent")
    tests = [f"tests/{word}" if (ROOT / "tests" / word).exists() else word for word in fault.tests]
    done = pytest(scratch, "-x", *tests)
    if done.returncode == 0:
        return None
    failed = re.search(r"^FAILED (.+?)(?: - |$)", done.stdout, re.MULTILINE)
    if failed is None:  # nothing ran, or nothing could be imported: that is no test's merit
        sys.exit(f"fault `{fault.name}`: no test failed, but pytest stopped:\n{(done.stdout + done.stderr)[-3000:]}")
    return failed.group(1)


def pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    if any(argument.startswith(KERNELS) for argument in arguments):
        environment["TRITON_INTERPRET"] = "1"
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def main(wanted: list[str]) -> int:
    faults = [Fault.read(text) for text in FAULTS.strip().split("\n\n")]
    faults = [fault for fault in faults if not wanted or any(word in fault.name for word in wanted)]
    if not faults:
        sys.exit(
            "no fault has that in its name; there are:\n"
            + "\n".join(line for line in FAULTS.splitlines() if "# " in line)
        )
    caught: dict[str, str] = {}
    for fault in faults:
        with tempfile.TemporaryDirectory() as scratch:
            test = caught_by(fault, Path(scratch))
        if test is not None:
            caught[fault.name] = test
        print(f"{fault.name:62} | {test or 'NOT CAUGHT'}", flush=True)
    in_interpreter = {test for test in caught.values() if test.startswith(KERNELS)}  # in a process of their own
    for tests in (in_interpreter, set(caught.values()) - in_interpreter):
        sound = pytest(ROOT, *tests) if tests else None
        if sound is not None and sound.returncode != 0:
            sys.exit(f"these tests must pass without a fault, but some do not:\n{sound.stdout[-3000:]}")
    print(f"{len(caught)} of {len(faults)} faults caught, by tests that pass without them")
    return 0 if faults and len(caught) == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
