"""Compiled loops over plain arrays: small networks, PPO and CartPole. They know no class of the package."""
