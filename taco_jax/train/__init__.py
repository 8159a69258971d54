"""The trainer, `python -m taco_jax.train`: loop, step and the state around it, checkpoints, metrics, dry runs."""
