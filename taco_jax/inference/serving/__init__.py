"""The HTTP server behind `python -m taco_jax.serve`.

programs: what is compiled. engine: the thread that runs it, for many requests at once. service: between the engine's
tokens and the texts of answers. chat, template_process: messages into a prompt. control: no control tokens in what
users write. requests, replies, app: the API. gate: who may ask. connections: deadlines and a limit below HTTP. process:
the server's life, from start to signal.
"""
