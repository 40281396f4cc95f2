"""Numba kernels on plain arrays: small networks, PPO and CartPole. They use no class of the package."""
