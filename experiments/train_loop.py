"""The training loop: resume, plan, train one stretch, save, judge, export."""

import dataclasses
import json
import logging
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from bevy_jax.experiments import (
  corpus,
  demo_model,
  evaluation,
  forward,
  training,
)
from bevy_jax.layers import config as config_lib

_log = logging.getLogger('train_demo')

PROMPTS = (
  'The old house at the end of the lane',
  '"I do not believe you," she said, and',
  'It was a cold morning in November when',
  'My dear Watson,',
  'def read_file(path):\n',
  'class Stack:\n    """',
  'import unittest\n\nclass Test',
  'for i in range(',
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """One call of the launcher.

  Attributes:
    corpus: folder of the texts.
    work: folder of checkpoints, token cache and metrics.
    target: folder that gets the Hugging Face directory.
    tokenizer: path of tokenizer.json.
    model: the model's shape.
    train: the training recipe.
    steps: length of the whole schedule, 0 to fix it from `plan_minutes`.
    plan_minutes: training time to plan for, once the speed is known.
    stretch_minutes: this call trains no longer than this after its start.
    save_every: steps between checkpoints.
    eval_every: steps between looks at the valid files.
    log_every: steps between progress lines.
    shards: files that the weights are written to.
  """

  corpus: pathlib.Path
  work: pathlib.Path
  target: pathlib.Path
  tokenizer: pathlib.Path
  model: config_lib.ModelConfig
  train: training.TrainConfig = dataclasses.field(
    default_factory=training.TrainConfig
  )
  steps: int = 0
  plan_minutes: float = 0.0
  stretch_minutes: float = 9.0
  save_every: int = 2500
  eval_every: int = 500
  log_every: int = 100
  shards: int = 1


class Run:
  """The state of one call; owns the checkpoint folder."""

  def __init__(self, job: Job):
    """Reads or makes the tokens and resumes from the last checkpoint."""
    if not job.steps and not job.plan_minutes:
      raise ValueError(
        'neither steps nor plan_minutes is set, so the schedule has no end; '
        'pass --steps=N or --plan_minutes=M.'
      )
    self.job, self._started = job, time.monotonic()
    self._deadline = self._started + 60 * job.stretch_minutes
    self._tokenizer = corpus.made_tokenizer(
      job.tokenizer, job.corpus, job.model.vocab_size
    )
    streams = corpus.tokenised(job.corpus, job.tokenizer, job.work / 'tokens')
    self.order = corpus.Order(
      [len(s) for s in streams.values()], job.train.window, job.train.seed
    )
    self._stream = jnp.asarray(np.concatenate(list(streams.values())))
    self._texts = self._windows()
    self._manager = ocp.CheckpointManager(
      (job.work / 'checkpoints').absolute(),
      options=ocp.CheckpointManagerOptions(
        max_to_keep=2, enable_async_checkpointing=False
      ),
    )
    self._log(f'the job: {json.dumps(dataclasses.asdict(job), default=str)}')
    self.state = self._restore()
    self._log(f'ready at step {int(self.state.step)}')

  def train(self) -> bool:
    """Trains until the schedule or the stretch ends; True for the former."""
    job, state = self.job, self.state
    first = step = int(state.step)
    total = int(state.total)
    rows, seen = job.train.rows, state.seen.tolist()
    queued: list[dict[str, jax.Array]] = []
    mark, begun = step, time.monotonic()
    while step < total and time.monotonic() < self._deadline:
      starts = jnp.asarray(self.order.starts(seen, rows))
      state, said = training.step(
        job.model, job.train, state, self._stream, starts
      )
      step += 1
      seen = [have + new for have, new in zip(seen, rows, strict=True)]
      queued.append(said)
      # Waiting for the step before the last keeps the device's queue filled.
      if len(queued) > 2:
        jax.block_until_ready(queued.pop(0))
      if step % job.log_every == 0:
        shown = jax.device_get(said)
        now = time.monotonic()
        speed = (step - mark) / (now - begun)
        self._progress(step, total, shown, speed)
        # The first interval compiles; a later one tells the true speed.
        if total == training.UNKNOWN and step >= first + 2 * job.log_every:
          total = self._plan(step, speed)
          state = state._replace(total=_number(total))
        if step % job.eval_every == 0:
          self._look(step, state.weights)
        if step % job.save_every == 0:
          self._save(step, state)
        mark, begun = step, time.monotonic()
    self.state = state
    if self._manager.latest_step() != step:
      self._save(step, state)
    return step >= total

  def finish(self, done: bool) -> dict[str, Any]:
    """Exports the weights in bfloat16 and judges them as exported."""
    job = self.job
    demo_model.export(job.model, self.state.weights, job.target, job.shards)
    corpus.write_tokenizer(self._tokenizer, job.target, job.model.context)
    weights = demo_model.rounded(self.state.weights)
    judged = {
      name: evaluation.evaluate(
        job.model, weights, windows, job.train.attention
      )
      for name, windows in self._texts.items()
    }
    use = evaluation.expert_use(
      {name: judged[name].loads for name in corpus.DOMAINS}
    )
    seen = self.state.seen.tolist()
    epochs = self.order.epochs(seen)
    metrics: dict[str, Any] = {
      'finished': done,
      'step': int(self.state.step),
      'total_steps': int(self.state.total),
      'tokens_seen': sum(seen) * job.train.window,
      'epochs': dict(zip(corpus.DOMAINS, epochs, strict=True)),
      'stretch_seconds': round(time.monotonic() - self._started, 1),
      'device': jax.devices()[0].device_kind,
      'jax': jax.__version__,
      'train': dataclasses.asdict(job.train),
      'texts': {name: said.figures() for name, said in judged.items()},
      'loads': {n: judged[n].loads.tolist() for n in corpus.DOMAINS},
      'experts': use,
    }
    _write(job.work / 'metrics.json', metrics)
    for name, said in judged.items():
      self._log(
        f'{name}: loss {said.loss:.4f}, {said.bits_per_byte:.4f} bits per byte'
      )
    self._log(f'experts: {use}')
    return metrics

  def samples(self, new_tokens: int = 120) -> list[dict[str, object]]:
    """Greedy and sampled continuations, written to samples.json."""
    job = self.job
    weights = demo_model.rounded(self.state.weights)
    made: list[dict[str, object]] = []
    for temperature in (0.0, 0.8):
      texts = evaluation.sample(
        job.model,
        weights,
        self._tokenizer,
        PROMPTS,
        new_tokens=new_tokens,
        temperature=temperature,
        seed=job.train.seed,
        attention=job.train.attention,
      )
      made += [{'temperature': temperature, 'text': t} for t in texts]
    _write(job.work / 'samples.json', made)
    for one in made:
      self._log(f'--- temperature {one["temperature"]}\n{one["text"]}')
    return made

  def _windows(self) -> dict[str, evaluation.Windows]:
    """Valid files whole, and a little of each training file to compare."""
    texts = {}
    for part in ('valid', 'train'):
      for domain in corpus.DOMAINS:
        path = self.job.corpus / f'{domain}.{part}.txt.xz'
        documents = corpus.read_documents(path)
        if part == 'train':
          documents = [documents[len(documents) // 2][:200_000]]
        name = domain if part == 'valid' else f'{domain}_train'
        texts[name] = evaluation.Windows.of(
          self._tokenizer, documents, self.job.train.window
        )
    return texts

  def _restore(self) -> training.State:
    job = self.job
    weights = demo_model.init(job.model, jax.random.key(job.train.seed))
    state = training.start(job.train, weights)
    latest = self._manager.latest_step()
    if latest is not None:
      self._log(f'resuming from step {latest}')
      restored = self._manager.restore(
        latest, args=ocp.args.StandardRestore(state._asdict())
      )
      state = training.State(**restored)
    if job.steps:
      state = state._replace(total=_number(job.steps))
    # Committed, as what a step returns and what a checkpoint restores, so that
    # all three are taken by one compiled program.
    committed: training.State = jax.device_put(state, jax.devices()[0])
    return committed

  def _save(self, step: int, state: training.State) -> None:
    begun = time.monotonic()
    self._manager.save(step, args=ocp.args.StandardSave(state._asdict()))
    self._manager.wait_until_finished()
    self._log(f'saved step {step} in {time.monotonic() - begun:.1f} s')

  def _progress(
    self, step: int, total: int, said: dict[str, np.ndarray], speed: float
  ) -> None:
    train = self.job.train
    end = '?' if total == training.UNKNOWN else str(total)
    rate = speed * train.batch * train.window
    self._log(
      f'step {step}/{end} loss {said["loss"]:.4f} lr {said["lr"]:.2e} '
      f'balance {said["balance"]:.3f} z {said["z"]:.2f} '
      f'grad {said["grad_norm"]:.2f} {rate / 1e6:.3f} M tokens/s'
    )

  def _plan(self, step: int, speed: float) -> int:
    job = self.job
    total = step + int(speed * 60 * job.plan_minutes)
    self._log(f'plan: {total} steps at {speed:.2f} steps/s')
    return max(total, 2 * job.train.warmup)

  def _look(self, step: int, weights: forward.Weights) -> None:
    said = []
    for name, windows in self._texts.items():
      one = evaluation.evaluate(
        self.job.model, weights, windows, self.job.train.attention
      )
      said.append(f'{name} {one.loss:.4f} ({one.bits_per_byte:.4f})')
    self._log(f'valid at {step}: ' + ', '.join(said))

  def _log(self, text: str) -> None:
    _log.info('%6.1f s  %s', time.monotonic() - self._started, text)


def _number(value: int) -> jax.Array:
  """Committed like the rest of the state."""
  return jnp.asarray(value, jnp.int32, device=jax.devices()[0])


def _write(path: pathlib.Path, value: object) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(value, indent=2) + '\n', encoding='utf-8')
