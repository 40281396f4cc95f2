"""Kernels on plain arrays: small networks, PPO, CartPole and tables of values. They use no class of the package."""
