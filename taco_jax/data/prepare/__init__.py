"""Text to a folder of token files: `python -m taco_jax.prepare`.

`text_files` reads documents from a place on, `encoding` makes ids of them in worker processes, `long_texts` does so in
windows where a text is long, `duplicates` remembers documents, `output` writes the folder so that a killed run goes on,
and `command` puts them together.
"""
