"""Training: the recipe of the paper's section 5 and later methods.

Read in this order: `run` (what `attent train` does), `config` and `run_options` (the settings), `tasks` (what differs
between tasks), `autoconfig` (automatic choices), `loop` (the training loop), `objective` and `loss`, `optimizer` and
`schedule`, `checkpoint`, `distributed`.
"""
