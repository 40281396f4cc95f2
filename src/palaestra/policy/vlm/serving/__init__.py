"""Sampling by inference engines: servers that speak vLLM's API, behind the interface of the other samplers.

engine            one engine over HTTP: replies, adapters, models; every answer is checked
adapter_export    the learner's adapter as a directory in PEFT's layout
probe             tokens of an engine scored by the learner: proof that the right weights answer
engine_pool       several engines: routing, retries, lost engines, the versions of the adapter
server_sampler    `ServerSampler`: the sampler and publisher
small_server      a small engine of our own with the same API, for tests
"""
