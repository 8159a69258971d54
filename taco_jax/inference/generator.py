"""`taco_jax.Generator`: text or token ids in, tokens as they come out.

    generator = Generator("path/to/model", tp=4, compression="mxfp4")
    for token in generator.generate("Once upon a time", max_tokens=50):
        print(token.text, end="", flush=True)

A decode step is started before the host reads what the one before it chose, so the devices need not wait for the host.
Rows that have ended stay in the batch until all have.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from taco_jax.codec import Codec
from taco_jax.compression.compression import Compression, refuse_options
from taco_jax.config import ConfigError
from taco_jax.inference.compiled import Programs, bucket
from taco_jax.inference.loading import Checkpoint, in_memory, load_params, open_checkpoint
from taco_jax.inference.sampling import NOT_FINITE, Sampling, why_not_finite
from taco_jax.inference.settings import Settings
from taco_jax.inference.text import missing_tokenizer
from taco_jax.mesh import make_mesh
from taco_jax.models.config import ModelConfig

Prompt = str | Sequence[int]
REMOVED = ("min_bytes", "link", "backend", "error_feedback")
"""Options that `Generator` once took beside `compression`, which are fields of it."""


class Token(NamedTuple):
    """One token of row `row` of the batch.

    text: what it adds to the row's text; empty while a character is not whole, for special tokens, and without a
      tokenizer. What a row's last token leaves unfinished is one U+FFFD. end: "eos" or "length" on a row's last token,
      else None.
    """

    row: int
    id: int
    text: str
    end: str | None


class Timing(NamedTuple):
    """The last call of `generate`, in seconds. tokens: of all rows, the first ones included.

    compiling: before the clock starts. first_token: from there until the host has the first token of every row (TTFT).
    rest: from then on.
    """

    compiling: float
    first_token: float
    rest: float
    rows: int
    tokens: int

    @property
    def tokens_per_second(self) -> float:
        """Returns the tokens per second of all rows together, after the first token."""
        return (self.tokens - self.rows) / self.rest if self.rest > 0 else 0.0


class Generator:
    """A model on its mesh, ready to go on with prompts.

    Args:
      model: a Hugging Face folder (config.json, tokenizer.json, model.safetensors or shards with an index) of GPT-2,
        Llama, Mistral, Qwen2, Qwen3 or Gemma, or a .gguf file; a training run's folder, "runs/x" for its latest
        checkpoint or "runs/x@340" for that of step 340; or what `open_checkpoint` returns.
      tp: tensor-parallel ranks, the first `tp` of `devices` (default: `jax.devices()`).
      compression: codec of the sums after row-parallel products (a preset's name, such as "mxfp4", with fields changed
        as in "int4h,block=32"; a Codec), or a `Compression` with other options: Compression("mxfp4", link="nccl").
        None sends them exactly, "auto" in the codec that is recommended (docs/codecs.md). Two of its fields mean more
        here where they are None: min_bytes, as tuned for the link and in decode steps at least 64 KiB; error_feedback,
        whether each sum takes along what the one before it lost (`taco_jax.psum_with_feedback`), which costs no bytes
        but for one exact message of a position of each row: yes with codecs of less than 8 bits, where sums are not one
        kernel over NVLink.
      plan: patterns of site names -> codecs, before `compression`, whose other options they share; a `Compression` has
        its own, None is exact. {"layers/mlp/down": "int8h"} is for all layers, {"layers/0/*": "int8h"} for the first.
      dtype: of weights and activations: bfloat16, float32 or float16. Norms, softmax and logits are float32.
      chains: parts of a long prompt, or of a batch of them, that go through each layer side by side: messages of one
        travel while another computes. None: two where the link is slow, else one.

    Raises:
      TypeError: an option of `compression` given by itself, with the new spelling.
      ConfigError: one line: what is wrong with which file, tensor or argument, and what would work.
    """

    def __init__(
        self,
        model: str | Path | Checkpoint,
        *,
        tp: int = 1,
        compression: str | Codec | Compression | None = None,
        plan: Mapping[str, str | Codec | Compression | None] | None = None,
        dtype: str = "bfloat16",
        devices: list | None = None,
        chains: int | None = None,
        **removed,
    ):
        refuse_options("Generator", {"compression": compression} | removed, REMOVED)
        if removed:
            raise TypeError(f"Generator: got an unexpected keyword argument {next(iter(removed))!r}")
        self.settings = Settings(tp, compression, plan or {}, dtype, chains)
        self.checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model)
        self.config = self.checkpoint.config
        try:
            self.mesh = make_mesh(tp=tp, devices=devices)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self.settings.layout(self.config, self.mesh.devices.flat[0], decoding=False)  # raises before minutes of reading
        params = load_params(self.checkpoint, self.mesh, dtype, self.settings.order)
        self.programs = Programs(self.config, self.settings, self.mesh, params)
        self.timing: Timing | None = None

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        params: Mapping[str, Any] | None = None,
        *,
        seed: int = 0,
        tokenizer: str | Path | None = None,
        eos: Iterable[int] = (),
        **options,
    ) -> Generator:
        """A generator of parameters that are in memory already, or of random ones.

        Args:
          config: the model's shape, such as `taco_jax.models.presets.preset("qwen2p5_7b")`.
          params: the tree of `taco_jax.models.params`, of a trained model for example (`taco_jax.load_run` returns both
            of a checkpoint), as arrays of the host or of devices; None draws them on the devices with `seed`.
          tokenizer: path of a tokenizer.json; None: prompts are token ids.
          eos: the ids that end a text.
          options: the other arguments of `Generator`.

        Raises:
          ConfigError: one line: which tensor is missing, left over, of another shape than the config says, or no float.
        """
        return cls(in_memory(config, params, seed=seed, tokenizer=tokenizer, eos=eos), **options)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises ConfigError for none at all, unknown ids, or text without a tokenizer."""
        if isinstance(prompt, str) and self.checkpoint.tokenizer is None:
            raise ConfigError(missing_tokenizer(self.checkpoint.path))
        ids = self.checkpoint.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(i) for i in prompt]
        if not ids:
            raise ConfigError(f"prompt={prompt!r}: has no tokens; give at least one")
        bad = [i for i in ids if not 0 <= i < self.config.vocab_size]
        if bad:
            raise ConfigError(f"prompt: token id {bad[0]} is not in the vocabulary of {self.config.vocab_size}")
        return ids

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_tokens: int = 128,
        sampling: Sampling | None = None,
        ignore_eos: bool = False,
        **fields,
    ) -> Iterator[Token]:
        """Tokens that follow each prompt, as they come: one of every row that has not ended, then the next.

        Args:
          prompts: a text, or token ids; or several, of any lengths.
          max_tokens: a row ends after so many, at a token that ends texts (unless ignore_eos), or where the model's
            longest sequence does.
          sampling: a `Sampling`, or its fields by name: temperature=0.8, top_p=0.9, seed=1. Greedy by default.

        Raises:
          ConfigError: a prompt as in `encode`, or as long as the model's longest sequence; settings out of range;
            while it runs, logits that are not finite.
        """
        if max_tokens < 1:
            raise ConfigError(f"max_tokens={max_tokens}: must be at least 1")
        sampling = sampling or Sampling(**fields)
        rows = [self.encode(prompt) for prompt in _as_batch(prompts)]
        longest = self.config.max_length
        for ids in rows:
            if len(ids) >= longest:
                raise ConfigError(
                    f"prompt: {len(ids)} tokens; the model's longest sequence has {longest}: one too many"
                )
        return self._run(rows, max_tokens, sampling, frozenset() if ignore_eos else self.checkpoint.eos)

    def complete(self, prompts: Sequence[Prompt], **options) -> list[str]:
        """The whole texts that follow several prompts; options as in `generate`."""
        texts = [""] * len(prompts)
        for token in self.generate(prompts, **options):
            texts[token.row] += token.text
        return texts

    def _run(self, rows: list[list[int]], max_tokens: int, sampling: Sampling, eos: frozenset[int]) -> Iterator[Token]:
        longest, batch, greedy = self.config.max_length, len(rows), sampling.greedy
        left = [min(max_tokens, longest - len(ids)) for ids in rows]
        length = bucket(max(map(len, rows)), longest)
        slots = max(length, bucket(max(len(ids) + n for ids, n in zip(rows, left)), longest))
        programs, compiled = self.programs, self.programs.compile_seconds
        prefill = programs.prefill(batch, length, slots, greedy=greedy)
        decode = programs.decode(batch, slots, greedy=greedy) if max(left) > 1 else None
        compiling = programs.compile_seconds - compiled

        tokens_BL = np.zeros((batch, length), np.int32)
        for row, ids in enumerate(rows):
            tokens_BL[row, : len(ids)] = ids
        tokenizer = self.checkpoint.tokenizer
        streams = [tokenizer.stream(ids) if tokenizer else None for ids in rows]
        start = time.perf_counter()
        tokens_BL, positions, settings = programs.put(
            (tokens_BL, np.array([len(ids) for ids in rows], np.int32), sampling.rows(batch))
        )
        chosen, cache = prefill(programs.params, tokens_BL, positions, settings)
        first = count = 0
        live = set(range(batch))
        for step in range(max(left)):
            arrived = chosen
            if step + 1 < max(left):
                chosen, positions, cache = decode(programs.params, chosen, positions, settings, cache)
            ids = np.asarray(arrived).tolist()
            first = first or time.perf_counter() - start
            count += len(live)
            self.timing = Timing(compiling, first, time.perf_counter() - start - first, batch, count)
            for row in sorted(live):
                if ids[row] == NOT_FINITE:
                    raise ConfigError(f"prompt {row}: {why_not_finite(self.settings.dtype)}")
                end = "eos" if ids[row] in eos else "length" if step + 1 == left[row] else None
                text = streams[row].add(ids[row]) if streams[row] and end != "eos" else ""
                if streams[row] and end:
                    text += streams[row].flush()
                if end:
                    live.discard(row)
                yield Token(row, ids[row], text, end)
            if not live:
                return


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt is a batch of one."""
    if isinstance(prompts, str):
        return [prompts]
    prompts = list(prompts)
    if not prompts:
        raise ConfigError("prompts=[]: give at least one prompt")
    return [prompts] if isinstance(prompts[0], int | np.integer) else prompts
