"""The flags of launchers that run sweeps: who runs it, and where rows go."""

from absl import flags

from bevy_jax.experiments import executors, sweep, workdir

CSV = flags.DEFINE_string('csv', '', 'Where to write the rows.')
EXECUTOR = flags.DEFINE_enum(
  'executor', 'local', executors.NAMES, 'Processes of this machine, or Ray.'
)
JOBS = flags.DEFINE_integer(
  'jobs', 2, 'Processes, or processors of a Ray of our own.', lower_bound=1
)
ADDRESS = flags.DEFINE_string(
  'address', '', 'Of a Ray cluster; empty: RAY_ADDRESS, or one of our own.'
)


def how(place: workdir.Workdir, name: str) -> sweep.How:
  """What the flags say; rows go to NAME.csv where nothing says otherwise."""
  return sweep.How(
    path=place.path(CSV.value, 'rows.csv') or f'{name}.csv',
    resume=place.goes_on,
    executor=executors.make(EXECUTOR.value, JOBS.value, ADDRESS.value),
    note=place.note,
  )
