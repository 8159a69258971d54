"""Inference with compressed tensor parallelism: load a checkpoint, go on with prompts, measure what a codec costs."""
