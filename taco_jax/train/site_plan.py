"""The codecs of a run: the `Compression` of every site, by the configuration, a plan's file and the guard."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from taco_jax import pipeline
from taco_jax.compression.compression import Compression, Plan, as_compression
from taco_jax.compression.plan_file import PlanFile, shape_of
from taco_jax.config import ConfigError, TrainConfig, sequence_parallel, site_compression
from taco_jax.models import decoder


def resolve_plan(config: TrainConfig, ranks_per_host: int | None = None) -> dict[str, Compression | None]:
    """Site name -> Compression of a configuration: the plan's patterns first, the two defaults for the rest."""
    c = config.compression
    changes = {"ranks_per_host": ranks_per_host}
    if config.mesh.pp > 1 and c.link == "auto":
        # Stages send in branches that others do not take, where no kernel over NVLink has run yet.
        changes["link"] = "nccl"
    try:
        names = decoder.site_names(config.model, config.mesh.tp)
        base, planned = site_compression(c, **changes), c.planned
        if planned is not None:
            check_plan(config, planned, names)
            rules = planned.rules(base)
        else:
            rules = {pattern: site_compression(c, codecs, **changes) for pattern, codecs in c.plan.items()}
        plan = Plan(rules, base).resolve(names)
        return plan | pipeline.plan(config)
    except ValueError as error:
        raise ConfigError(f"compression: {error}") from error


def check_plan(config: TrainConfig, planned: PlanFile, names: Iterable[str]) -> None:
    """Raises ConfigError for the file of a plan that this run cannot have: another model's, or of other sites."""
    if planned.made.get("use", "training") != "training":
        rule = "is a plan for inference; make one with python -m taco_jax.calibrate --use training"
        raise ConfigError(f"{planned.source}: {rule}")
    if planned.arrangement is not None:
        rule = "is of inference, which folds it into weights as it reads them; calibrate without --arrange"
        raise ConfigError(f"{planned.source}: arrangement: {rule}")
    planned.check_model(shape_of(config.model), names)
    fed = [name for name, site in planned.sites.items() if site.error_feedback]
    for key, value, limit in (
        ("sequence_parallel", sequence_parallel(config)[0], False),
        ("model.post_norms", config.model.post_norms, False),
    ):
        if fed and value != limit:
            raise ConfigError(
                f"{planned.source}: site {fed[0]!r} has error feedback, which is never used with {key}={value}; set "
                f"{key}={limit}, or calibrate with --feedback off"
            )


def in_other_codecs(plan: Mapping[str, Compression | None], codecs: Mapping[str, str]) -> dict[str, Compression | None]:
    """Returns the plan with ways "SITE/forward" and "SITE/backward" in these codecs, between hosts too."""
    changed = dict(plan)
    for way, codec in codecs.items():
        site, _, direction = way.rpartition("/")
        changed[site] = dataclasses.replace(changed[site], between_hosts=None, **{direction: codec})
    return {site: as_compression(compression) for site, compression in changed.items()}
