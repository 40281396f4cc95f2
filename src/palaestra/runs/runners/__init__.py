"""The trainers we know, each turned into one command: ours, CleanRL's scripts, Stable-Baselines3, and `echo` for tests.

`table` lists them; `conformance` is what one of your own must pass, `template` where to begin (docs/runners.md).
"""
