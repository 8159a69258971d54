"""How messages are sent.

compression: `Compression`, the options of a message, and `Plan`. plan_file: plans as files. site_scales: the state of
site scales. tuned: what was measured on a link. dispatch: which kernel, or the jnp codec, encodes and decodes.
"""
