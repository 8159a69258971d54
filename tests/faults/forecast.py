"""Faults of the forecast: what is counted, what goes at the same time, what is recommended."""

from faults.mutant import Mutant

TESTS = ("tests/forecast/test_predict.py",)
MUTANTS = (
    Mutant(
        "forecast-waves",
        "the last, unfilled wave of a product's tiles takes a part of a wave's time",
        "taco_jax/forecast/cost.py",
        "waves = math.ceil(tiles / self.gpu.sms)",
        "waves = tiles / self.gpu.sms",
        TESTS,
    ),
    Mutant(
        "forecast-remat",
        "a recomputation has the products whose sums were kept",
        "taco_jax/forecast/work.py",
        "if sums else [])",
        "if True else [])",
        TESTS,
    ),
    Mutant(
        "forecast-beside",
        "forward messages go beside products too",
        "taco_jax/forecast/predict.py",
        'entering = message.direction == "backward" and',
        "entering = True or",
        TESTS,
    ),
    Mutant(
        "forecast-ring",
        "an exact sum sends the bytes of one hop",
        "taco_jax/forecast/links.py",
        ".seconds(2 * (ranks - 1) / ranks * nbytes)",
        ".seconds((ranks - 1) / ranks * nbytes)",
        TESTS,
    ),
    Mutant(
        "forecast-levels",
        "each rank of a host sends the whole message to other hosts",
        "taco_jax/forecast/cost.py",
        "share = coarse / local",
        "share = coarse",
        TESTS,
    ),
    Mutant(
        "forecast-rail",
        "a host's network card is each GPU's own",
        "taco_jax/forecast/cost.py",
        "return min(card, card * self.rails / senders)",
        "return card",
        TESTS,
    ),
    Mutant(
        "forecast-spread",
        "ranks of dp count as neighbours on a host",
        "taco_jax/forecast/cost.py",
        '"dp": sizes["tp"] * sizes["pp"]}[axis]',
        '"dp": 1}[axis]',
        TESTS,
    ),
    Mutant(
        "forecast-calls",
        "chains send no more messages",
        "taco_jax/forecast/messages.py",
        "calls = layers * config.chains * ticks * config.accumulation",
        "calls = layers * ticks * config.accumulation",
        ("tests/forecast/test_messages.py -k 'traced and chains'",),
    ),
    Mutant(
        "forecast-limit",
        "a codec is recommended whatever it costs in loss",
        "taco_jax/forecast/advice.py",
        "if c.loss is not None and c.loss.change <= limit and",
        "if c.loss is not None and",
        TESTS,
    ),
    Mutant(
        "forecast-feedback",
        "the record of the first token is that without error feedback",
        "taco_jax/forecast/record.py",
        'name = forward + (FEEDBACK if feedback else "")',
        "name = forward",
        TESTS,
    ),
)
