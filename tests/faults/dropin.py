"""Faults of the compiler hook: groups, decisions, edits of modules, caches."""

from faults.mutant import Mutant

OPERATIONS = "tests/dropin/test_operations.py"

MUTANTS = (
    Mutant(
        "drop-in-rank-order",
        "ranks of a gather over two axes count in the mesh's order, whatever the groups'",
        "taco_jax/dropin/mesh_axes.py",
        "return frozenset(groups) if ordered else",
        "return frozenset(map(frozenset, groups)) if ordered else",
        ("tests/dropin/test_mesh_axes.py",),
    ),
    Mutant(
        "drop-in-mesh-order",
        "groups over a mesh whose devices are in another order are read as if they were counted",
        "taco_jax/dropin/mesh_axes.py",
        'if mesh.HasField("iota_ids"):',
        "if False:",
        ("tests/dropin/test_mesh_axes.py",),
    ),
    Mutant(
        "drop-in-direction",
        "collectives of the backward pass go in the forward codec",
        "taco_jax/dropin/plan.py",
        'compression.codecs[direction == "backward"]',
        "compression.codecs[0]",
        ("tests/dropin/test_values.py -k test_codecs",),
    ),
    Mutant(
        "drop-in-other-slice",
        "a slice of another device's part of a sum is taken for the own part",
        "taco_jax/dropin/sum_and_slice.py",
        "if start is None or int(start) != rank * part[dim]:",
        "if start is None:",
        (f"{OPERATIONS} -k another_part",),
    ),
    Mutant(
        "drop-in-merged-axes",
        "sums over different axes are merged into one",
        "taco_jax/dropin/merge_sums.py",
        "return groups, term.collective.instruction.shape",
        "return 0, term.collective.instruction.shape",
        (f"{OPERATIONS} -k different_axes",),
    ),
    Mutant(
        "drop-in-read-twice",
        "a sum that others read too is merged with another",
        "taco_jax/dropin/merge_sums.py",
        "if _is_root(computation, id) or len(users) != 1:\n        return False",
        "if _is_root(computation, id):\n        return False",
        (f"{OPERATIONS} -k others_read",),
    ),
    Mutant(
        "drop-in-maximum",
        "maxima are sent as sums",
        "taco_jax/dropin/collective_forms.py",
        'if reducer.root.opcode != "add":',
        'if reducer.root.opcode not in ("add", "maximum"):',
        (f"{OPERATIONS} -k never_compressed",),
    ),
    Mutant(
        "drop-in-weights",
        "weights are gathered compressed although the plan names only their axis",
        "taco_jax/dropin/rewrite.py",
        "if dataflow.is_argument(self.module, computation, part.operands[0]):",
        "if False:",
        ("tests/dropin/test_values.py -k sharded_weights",),
    ),
    Mutant(
        "drop-in-cache-key",
        "a program without a plan is taken from the persistent cache for one with it",
        "taco_jax/dropin/compat.py",
        "cache_key.custom_hook = lambda: before() + addition()",
        "cache_key.custom_hook = before",
        ("tests/dropin/test_hook.py -k persistent_cache",),
    ),
    Mutant(
        "drop-in-cached-report",
        "programs from the persistent cache are not listed",
        "taco_jax/dropin/hook.py",
        "            self.history(plan).loaded(thread)",
        "            pass",
        ("tests/dropin/test_hook.py -k persistent_cache",),
    ),
    Mutant(
        "drop-in-threads",
        "a plan is in force in every thread",
        "taco_jax/dropin/hook.py",
        "own = self._in_threads.get(thread)",
        "own = next(iter(self._in_threads.values()), None)",
        ("tests/dropin/test_hook.py -k plan_is_of_its_thread",),
    ),
)
