"""The HTTP server behind `python -m taco_jax.serve`.

programs: what is compiled. engine: the thread that runs it, for many requests at once. service: between the engine's
tokens and the texts of answers. requests, replies, app: the API. process: the server's life, from start to signal.
"""
