"""Any trainer that is built on transformers.Trainer: what it logs is posted. TRL's adapter adds the rows."""

from typing import Any

from transformers import TrainerCallback

from unspiral_health.llds import LLDS
from unspiral_health.run import Run


class MetricsCallback(TrainerCallback):
    """url, name: of the run, as in `Run`, as are the options. llds: for an adapter that adds it to the
    loss."""

    def __init__(
        self, url: str | None = None, name: str | None = None, *, llds: LLDS | None = None, **options: Any
    ):
        self.llds = llds
        self.options = {"url": url, "name": name, "trainer": "trl", **options}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run = Run(rank=args.process_index, **self.options)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.run.post(state.global_step, logs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.close()
        if self.llds is not None:
            print(self.llds.report(), flush=True)
