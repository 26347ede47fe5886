"""From data to a model: the recipe of the paper's section 5 and what the field has learned since.

Read in this order: `config` (what a run is), `task` (what differs between tasks), `choose` (what a run takes by itself,
and why), `prepare` (pairs to batches), `objective` and `loss` (what is minimised), `schedule` and `optimiser` (how),
`loop` (the training itself), `checkpoint` (nothing lost), `team` (more than one process). Translating and scoring while
it trains is handed in from outside. The tasks on text alone share `texts`: `language`, `masked`, `corrupted` (spans),
`labelled`; those on images are `images`.
"""
