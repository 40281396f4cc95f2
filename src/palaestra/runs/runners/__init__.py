"""The trainers that runs can use: our own, CleanRL scripts, Stable-Baselines3, and `echo` for tests.

`registry` lists them. `template` is a starting point for your own runner, and `conformance` checks it.
"""
