"""The forecast: time of a training step, or to the first token, exact and with each codec, before anything runs.

hardware: GPUs by name. links: what carries messages. constants: what was fitted on sums and kernels, with sources.
work: the products and the memory traffic of a step. messages: what a step sends, by site. cost: their times. overlap:
what goes beside what in chains. predict: a whole step, and the time to the first token. scale: many hosts. record: what
codecs cost in loss. advice: one recommendation in words. report and plot: what the command shows. measure: a minute on
the user's devices. command: `python -m taco_jax.advise`.

Nothing here starts a device or compiles, but for `measure`.
"""
