"""The measurement of what pays on a link: `python -m taco_jax.tune`.

settings: its flags. layer: the layer that is timed. measure: the ways of a message, compiled and timed. result: the
decision, as the file says it. report: lines and tables. command: all of it in order.
"""
