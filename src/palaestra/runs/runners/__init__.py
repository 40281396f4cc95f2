"""The trainers that runs can use: our own, scripts of CleanRL and CORL, Stable-Baselines3, and `echo` for tests.

`registry` lists them. `template` is a starting point for your own runner, and `conformance` checks it.
"""
