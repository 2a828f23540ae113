"""The engines that write texts: what a batch of prompts becomes, by transformers or by vLLM."""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pyspark import TaskContext
from torch import nn

from sparkdl.codec.files import path_here
from sparkdl.errors import ModelError, ParameterError, kind_of, nearest, optional_library, shown
from sparkdl.infer.forward import device_of
from sparkdl.infer.source import library, read_model
from sparkdl.process.determinism import seeded
from sparkdl.replica.compute import buffers_kept, evaluating
from sparkdl.spark.device import VISIBLE

WARPERS = {
    "temperature": ("TemperatureLogitsWarper", 1.0),
    "top_h": ("TopHLogitsWarper", None),
    "top_k": ("TopKLogitsWarper", 0),
    "top_p": ("TopPLogitsWarper", 1.0),
    "min_p": ("MinPLogitsWarper", None),
    "typical_p": ("TypicalLogitsWarper", 1.0),
    "epsilon_cutoff": ("EpsilonLogitsWarper", 0.0),
    "eta_cutoff": ("EtaLogitsWarper", 0.0),
}
"""The arguments that shape the distribution of a sampled token, in the order in which they apply: the
class of transformers, and the value that changes nothing."""


@dataclass(frozen=True)
class Sampling:
    """The way in which texts are written.

    Attributes:
        max_new_tokens: The most tokens of a text.
        num_return_sequences: The number of texts for each prompt.
        stop_strings: A text ends where it contains one of these.
        do_sample: Draw tokens, in place of taking the most likely one.
        warpers: The values of :data:`WARPERS` that change the distribution of a drawn token.
        others: Further arguments of the engine, as the user gave them.
        seed: The seed from which the seed of each row follows.
    """

    max_new_tokens: int
    num_return_sequences: int = 1
    stop_strings: tuple[str, ...] = ()
    do_sample: bool = False
    warpers: Mapping[str, float] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


class Completion(NamedTuple):
    """A text that was written: its tokens, up to the one that ended it, and the reason of its end.

    That is "stop" if the model or a stop string ended it, and "length" if the limit did.
    """

    token_ids: Sequence[int]
    finish_reason: str


class GenerationEngine(ABC):
    """The interface of the engines of :func:`sparkdl.generate`.

    The driver calls :meth:`load` once, and what that returns travels to the executors by pickle. There,
    each process calls :meth:`generate` for one batch after another, of prompts of similar length.

    Attributes:
        batch_size: The number of prompts of a batch, if the user does not say.
        on_cpu: The engine looks for its GPUs itself.
        config: The configuration of the model, as transformers has it, or None.
        generation_config: That of its texts, or None.
        folder: The folder of the model, or None.
    """

    batch_size: int = 32
    on_cpu: bool = False
    config: Any = None
    generation_config: Any = None
    folder: Path | None = None

    @abstractmethod
    def load(self, model: Any, dtype: torch.dtype | None) -> GenerationEngine:
        """Return an engine for a model.

        Args:
            model: The model, as the user gave it.
            dtype: The dtype of the weights; None: as they are.

        Raises:
            UserError: The engine does not take this model.
        """

    def check(self, sampling: Sampling) -> None:  # noqa: B027 - there may be nothing to check
        """Raise a UserError on the driver, before any job, if texts cannot be written in this way.

        Args:
            sampling: The way.

        Raises:
            UserError: The model or an argument does not fit.
        """

    @abstractmethod
    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling
    ) -> list[list[Completion]]:
        """Return ``sampling.num_return_sequences`` texts for each prompt, in order.

        A text is a pair: the numbers of its tokens, and "stop" or "length".

        Args:
            prompts: The numbers of the tokens of each prompt.
            seeds: A seed for each prompt, on which alone its draws depend.
            sampling: The way in which they are written.
        """


class TransformersEngine(nn.Module, GenerationEngine):
    """The engine that calls ``generate`` of a model of transformers, on the task's device."""

    def __init__(self, model: Any = None, folder: Path | None = None) -> None:
        super().__init__()
        self.model: Any
        self.model, self.folder = model, folder
        self.tokenizer: Any = None  # for stop strings
        self.config = getattr(model, "config", None)
        self.generation_config = getattr(model, "generation_config", None)

    def load(self, model: Any, dtype: torch.dtype | None) -> TransformersEngine:
        """Read the model; a copy of it has another ``dtype``."""
        source = read_model(model)
        module, can = source.module, getattr(source.module, "can_generate", None)
        if not hasattr(module, "generate") or (can is not None and not can()):
            raise ModelError(
                f"the model is {kind_of(module)}, which writes no text: give one of transformers that "
                "does, ...ForCausalLM or ...ForConditionalGeneration."
            )
        if dtype is not None and any(p.dtype != dtype for p in module.parameters()):
            module = copy.deepcopy(module).to(dtype)
        return TransformersEngine(module, source.folder)

    def check(self, sampling: Sampling) -> None:
        """Write one token."""
        given, known = sampling.others, library().GenerationConfig()
        for name in given:
            if not hasattr(known, name):
                near = nearest(name, [*vars(known)])
                raise ParameterError(
                    f"generate has no argument {shown(name)}, nor has transformers.{near}"
                )
        if (given.get("num_beams") or 1) > 1 and (sampling.do_sample or sampling.stop_strings):
            raise ParameterError("num_beams= goes with neither sampling nor stop_strings=.")
        try:
            with seeded(0), evaluating(self), buffers_kept(self):
                self.generate([[1, 1]], [0], replace(sampling, max_new_tokens=1))
        except Exception as error:
            raise ModelError(
                f"the model fails on a prompt of two tokens: {type(error).__name__}: {error}"
            ) from error

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling
    ) -> list[list[Completion]]:
        """Pad the prompts on the left, and write."""
        transformers, device = library(), device_of(self.model)
        config, count = self._config(sampling), sampling.num_return_sequences
        decodes = bool(getattr(self.config, "is_encoder_decoder", False))
        ids = torch.full((len(prompts), max(map(len, prompts))), config.pad_token_id)
        mask = torch.zeros_like(ids)
        for row, there, prompt in zip(ids, mask, prompts, strict=True):
            place = slice(len(prompt)) if decodes else slice(len(row) - len(prompt), None)
            row[place], there[place] = torch.tensor(prompt), 1
        start = 1 if decodes else ids.shape[1]
        processors, criteria = transformers.LogitsProcessorList(), []
        if sampling.do_sample:
            ids, mask = (x.repeat_interleave(count, 0) for x in (ids, mask))
            processors.append(_draws(seeds, sampling, start, device))
        stops = _Stops(self.tokenizer, sampling.stop_strings, start, len(ids))
        if sampling.stop_strings:
            criteria.append(stops)
        found = self.model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            generation_config=config,
            logits_processor=processors,
            stopping_criteria=transformers.StoppingCriteriaList(criteria),
        )[:, start:].cpu()
        ends = config.eos_token_id
        ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
        texts = [
            _completion(row.tolist(), ends, stopped, sampling.max_new_tokens)
            for row, stopped in zip(found, stops.lengths * (len(found) // len(ids)), strict=True)
        ]
        return [texts[i : i + count] for i in range(0, len(texts), count)]

    def _config(self, sampling: Sampling) -> Any:
        """Return the configuration of transformers; tokens are drawn by a processor, not by it."""
        config = copy.deepcopy(self.generation_config)
        given = dict(sampling.others)
        if sampling.do_sample or sampling.stop_strings:
            given["num_beams"] = 1
        if not sampling.do_sample:
            given["num_return_sequences"] = sampling.num_return_sequences
        given |= dict.fromkeys(WARPERS) | {"do_sample": False, "return_dict_in_generate": False}
        config.update(max_new_tokens=sampling.max_new_tokens, **given)
        ends, pad = config.eos_token_id, getattr(self.tokenizer, "pad_token_id", None)
        if config.pad_token_id is None:
            config.pad_token_id = pad if pad is not None else 0
        if isinstance(ends, torch.Tensor):
            config.eos_token_id = ends.tolist()
        return config


def _completion(
    tokens: list[int], ends: Sequence[int], stopped: int | None, most: int
) -> Completion:
    """Return the text of a row, which is filled up after its end."""
    ended = next((place + 1 for place, token in enumerate(tokens) if token in ends), None)
    lengths = [length for length in (ended, stopped) if length is not None]
    if not lengths:
        return Completion(tokens[:most], "length")
    return Completion(tokens[: min(lengths)], "stop")


def _draws(seeds: Sequence[int], sampling: Sampling, start: int, device: torch.device) -> Any:
    """Return a processor that leaves one token a row, drawn by numbers that the row's seed gives.

    A row's tokens so depend on its seed and its own distribution, not on the others of the batch.
    """
    transformers = library()
    shape = sampling.num_return_sequences, sampling.max_new_tokens
    numbers = [np.random.Generator(np.random.PCG64(seed)).random(shape) for seed in seeds]
    table = torch.from_numpy(np.concatenate(numbers)).to(device)
    warpers = [getattr(transformers, WARPERS[n][0])(value) for n, value in sampling.warpers.items()]

    class Drawn(transformers.LogitsProcessor):  # type: ignore[misc, name-defined]
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            for warp in warpers:
                scores = warp(input_ids, scores)
            step = input_ids.shape[1] - start
            total = scores.double().softmax(1).cumsum(1)
            drawn = table[:, step : step + 1] * total[:, -1:]
            tokens = torch.searchsorted(total, drawn, right=True).clamp(max=scores.shape[1] - 1)
            return torch.full_like(scores, -torch.inf).scatter(1, tokens, 0.0)

    return Drawn()


class _Stops:
    """A criterion of transformers that ends rows at a stop string, and notes their lengths."""

    def __init__(self, tokenizer: Any, strings: Sequence[str], start: int, rows: int) -> None:
        self._tokenizer, self._strings, self._start = tokenizer, strings, start
        self.lengths: list[int | None] = [None] * rows
        most = max((len(one.encode()) for one in strings), default=0)
        self._looked_at = most + 8  # a token has a byte at least, but for special ones

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        first = max(self._start, input_ids.shape[1] - self._looked_at)
        tails = input_ids[:, first:].tolist()
        for row, length in enumerate(self.lengths):
            if length is None:
                text = self._tokenizer.decode(tails[row], skip_special_tokens=True)
                if any(one in text for one in self._strings):
                    self.lengths[row] = input_ids.shape[1] - self._start
        ended = [length is not None for length in self.lengths]
        return torch.tensor(ended, device=input_ids.device)


class VllmEngine(GenerationEngine):
    """The engine that calls vLLM, the extra ``vllm``, which must be installed on the executors.

    Each Python process opens the model's folder once, on the GPUs that Spark assigned to its task. So
    the folder must be at the same path on every node. The engine is not tried on the driver.

    Args:
        options: Further arguments of ``vllm.LLM``, such as ``tensor_parallel_size=2``.
    """

    batch_size = 512
    on_cpu = True

    def __init__(self, **options: Any) -> None:
        self.options = options
        self._open: Any = None  # in a worker

    def __repr__(self) -> str:
        return f"VllmEngine({self.options}, {self.folder})"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": None}

    def load(self, model: Any, dtype: torch.dtype | None) -> VllmEngine:
        """Read the configuration in the model's folder."""
        if not isinstance(model, (str, os.PathLike)) or not path_here(model).is_dir():
            raise ModelError(
                f"vLLM opens the folder of a model on each node, and model is {shown(model)}: give the "
                "path of a folder of save_pretrained that all nodes reach."
            )
        known = {} if dtype is None else {"dtype": str(dtype).removeprefix("torch.")}
        made, transformers = VllmEngine(**{**known, **self.options}), library()
        made.folder = path_here(model).resolve()
        made.config = transformers.AutoConfig.from_pretrained(made.folder, local_files_only=True)
        made.generation_config = transformers.GenerationConfig.from_model_config(made.config)
        if (made.folder / "generation_config.json").exists():
            made.generation_config = transformers.GenerationConfig.from_pretrained(made.folder)
        return made

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling
    ) -> list[list[Completion]]:
        """Give vLLM the whole batch, which it schedules itself."""
        vllm = optional_library("vllm", 'engine="vllm"', "vllm")
        if self._open is None:
            with _own_gpus():
                self._open = vllm.LLM(model=str(self.folder), **self.options)
        how: dict[str, Any] = {
            "max_tokens": sampling.max_new_tokens,
            "n": sampling.num_return_sequences,
            "stop": list(sampling.stop_strings) or None,
            **(sampling.warpers if sampling.do_sample else {"temperature": 0.0}),
            **sampling.others,
        }
        found = self._open.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            [vllm.SamplingParams(seed=seed, **how) for seed in seeds],
            use_tqdm=False,
        )
        return [
            [Completion(list(one.token_ids), one.finish_reason or "length") for one in row.outputs]
            for row in found
        ]


@contextmanager
def _own_gpus() -> Iterator[None]:
    """Let a library that counts GPUs itself see those alone that Spark assigned to this task."""
    context = TaskContext.get()
    gpu = None if context is None else context.resources().get("gpu")
    before = os.environ.get(VISIBLE)
    if gpu is not None:
        seen = before.split(",") if before else []
        by_place = {str(place): name for place, name in enumerate(seen)}
        names = [a if a in seen else by_place.get(a, a) for a in gpu.addresses]
        os.environ[VISIBLE] = ",".join(names)
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    try:
        yield
    finally:
        if gpu is not None:
            os.environ.pop(VISIBLE)
        if before is not None:
            os.environ[VISIBLE] = before
