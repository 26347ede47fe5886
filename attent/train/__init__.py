"""From pairs to a translator: the recipe of the paper's section 5 and what the field has learned since.

Read in this order: `config` (what a run is), `choose` (what it takes by itself, and why), `prepare` (text to batches),
`objective` and `loss` (what is minimised), `schedule` and `optimiser` (how), `loop` (the training itself), `checkpoint`
(nothing lost), `team` (more than one process). Translating and scoring while it trains is handed in from outside.
"""
