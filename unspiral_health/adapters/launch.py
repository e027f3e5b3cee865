"""verl and OpenRLHF train inside Ray actors; this starts their own commands with those actors watched.

    export UNSPIRAL_LIKELIHOOD_URL=http://127.0.0.1:8100 UNSPIRAL_RUN=my-run UNSPIRAL_LLDS_LAMBDA=0.2
    python -m unspiral_health.adapters.launch verl actor_rollout_ref.actor.policy_loss.loss_mode=llds ...
    python -m unspiral_health.adapters.launch openrlhf --actor.model_name_or_path ...

On a Ray cluster that runs already, the variables go into the job's runtime environment too.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

from services.common.errors import UserError
from services.common.names import accepted
from unspiral_health.adapters import openrlhf as openrlhf_adapter
from unspiral_health.adapters import verl as verl_adapter
from unspiral_health.llds import LLDS
from unspiral_health.run import Run

PLUGIN = "unspiral_health.adapters.verl_plugin"


def verl() -> None:
    """verl's command, its task runner with the trainer of `trainer.v1.trainer_mode` watched."""
    os.environ["VERL_USE_EXTERNAL_MODULES"] = PLUGIN
    import ray
    from verl.trainer import main_ppo

    main_ppo.TaskRunnerV1 = ray.remote(watching(main_ppo.TaskRunnerV1.__ray_metadata__.modified_class))
    main_ppo.main()


def watching(runner: type) -> type:
    """verl's task runner, posting what its trainer does. Raises EnvironmentLacks at the end of a training in
    which no update was seen."""

    class Watching(runner):
        def run(self, config: Any) -> None:
            from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

            mode = config.trainer.v1.trainer_mode
            with Run(trainer="verl") as run:
                TRAINER_REGISTRY[mode] = verl_adapter.watched(TRAINER_REGISTRY[mode], run)
                super().run(config)
                run.confirm(0)

    return Watching


def openrlhf() -> None:
    """OpenRLHF's command, its policy actors watched and with LLDS."""
    import ray
    from openrlhf.trainer.ray import ppo_actor

    plain = ppo_actor.PolicyModelActor.__ray_metadata__.modified_class
    given = {name: os.environ.get(name) for name in ("UNSPIRAL_LIKELIHOOD_URL", "UNSPIRAL_RUN")}
    actor = openrlhf_adapter.watched(plain, LLDS.from_environment(), *given.values())
    ppo_actor.PolicyModelActor = ray.remote(num_gpus=1)(actor)
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")


COMMANDS: dict[str, Callable[[], None]] = {"verl": verl, "openrlhf": openrlhf}


def main() -> None:
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in COMMANDS:
        raise UserError(f"trainer {name!r}: {accepted(name, list(COMMANDS))}")
    COMMANDS[name]()


if __name__ == "__main__":
    main()
