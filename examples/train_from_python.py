"""Train an agent from Python, then read how its success changed.

    python examples/train_from_python.py [RUN_DIRECTORY]

The default is a tiny run of a few seconds: the embedded model learns a two-armed bandit.
"""

import sys

from ragen import train
from ragen.config.compose import resolve
from ragen.store.run_folder import RunFolder


def main(run_directory: str = "checkpoints/examples/bandit") -> float:
    """Train, and return the success at the last validation."""
    sizes = ["es_manager.train.env_groups=8", "es_manager.val.env_groups=16"]
    config = resolve(["two_armed_bandit", "model_path=pocket", *sizes]).config
    config.trainer.total_training_steps = 4
    config.trainer.default_local_dir = run_directory

    run = train(config)

    successes = RunFolder(run.folder).read_metrics().series("val-env/TwoArmedBandit/success")
    for step, success in successes:
        print(f"step {step}: success {success:.0%}")
    print(f"{run.status} after {run.num_steps} steps; report: {run.report}")
    return successes[-1][1]


if __name__ == "__main__":
    main(*sys.argv[1:2])
