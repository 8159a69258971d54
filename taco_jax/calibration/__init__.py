"""Plans from data: what each site's messages are like, what an error there costs, which codec each gets.

probe: what is measured at one message. measure: the programs that run a model under a probe. allocation: the choice
under a budget. candidates: codecs to choose from. report, plot: the table and the picture. command:
`python -m taco_jax.calibrate`.
"""
