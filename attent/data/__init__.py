"""Pairs to batches: parallel text of any format is read, looked at, filtered, turned into numbers and batched.

The way of a pair: `corpus` finds the files that a person named and `readers` read them; `filters` drops what would
teach nothing; `store` keeps the token ids in memory-mapped arrays; `batches` lays them into batches. `report` tells
what a corpus is like before hours are spent on it. Words become numbers in `attent.text`.
"""
