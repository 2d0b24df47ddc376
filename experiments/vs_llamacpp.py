"""This engine against llama.cpp on this machine, with the same budget.

python -m bevy_jax.experiments.vs_llamacpp --model=DIR --cache_gib=8 \\
  --llama_batched_bench=PATH --gguf=FILE

The program is your own llama-batched-bench: it is neither built nor downloaded
here. Both run turn by turn, each in a process of its own; llama.cpp keeps the
experts of so many layers in host memory that the others fit the budget.
"""

from absl import flags

from bevy_jax.experiments import ablation, launcher, llamacpp, outcome, workdir

BINARY = flags.DEFINE_string('llama_batched_bench', '', 'The program.')
GGUF = flags.DEFINE_string('gguf', '', 'The same model for llama.cpp.')
MODEL = flags.DEFINE_string('model', 'demo', "'demo' or a model's directory.")
CACHE = flags.DEFINE_float('cache_gib', 0.0, 'GiB of the device for experts.')
REQUESTS = flags.DEFINE_integer('requests', 8, 'Rows that decode at once.')
PROMPT = flags.DEFINE_integer('prompt_tokens', 128, 'Tokens of each prompt.')
TOKENS = flags.DEFINE_integer('new_tokens', 64, 'Tokens a request.')
PAIRS = flags.DEFINE_integer('pairs', 5, 'Turns of both.')
ARGS = flags.DEFINE_list('llama_args', [], 'More arguments for the program.')
SET = flags.DEFINE_multi_string('set', [], 'FIELD=VALUE of our run or engine.')
LIMIT_S = flags.DEFINE_float('limit_s', 3600, 'A turn may take so long.')


def build_config() -> llamacpp.Asked:
  """The comparison; ValueError says what to pass, or that models differ."""
  asked = llamacpp.Asked(
    binary=BINARY.value,
    file=GGUF.value,
    model=MODEL.value,
    cache_gib=CACHE.value,
    requests=REQUESTS.value,
    prompt_tokens=PROMPT.value,
    new_tokens=TOKENS.value,
    pairs=PAIRS.value,
    arguments=tuple(ARGS.value),
    set=tuple(SET.value),
    limit_s=LIMIT_S.value,
  )
  llamacpp.check(asked)
  return asked


def main(asked: llamacpp.Asked, place: workdir.Workdir) -> outcome.Outcome:
  """Measures the pairs; the ratio is the median over them."""
  rows = []
  for row in llamacpp.measure(asked):
    rows.append(row)
    place.note(row)
    print(f'pair {row["pair"]}: ratio {row["ratio"]:.3f}', flush=True)
  report = llamacpp.report(asked, rows)
  shown = [
    {
      'pair': row['pair'],
      'ours tokens/s': f'{row["ours_tokens_per_s"]:.2f}',
      'llama.cpp tokens/s': f'{row["llama_tokens_per_s"]:.2f}',
      'ratio': f'{row["ratio"]:.3f}',
    }
    for row in rows
  ]
  last = f'ours / llama.cpp {report["ratio"]:.3f}, median of {len(rows)} pairs'
  return outcome.Outcome(
    report, (ablation.table(shown), *report['notes'], last)
  )


if __name__ == '__main__':
  launcher.run(main, build_config, device=False)
