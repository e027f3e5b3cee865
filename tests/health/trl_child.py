"""One process of a training with TRL's callback: what GRPOTrainer would call, with a tiny model. Started by
torchrun."""

import importlib.util
import os
import sys
from types import SimpleNamespace

import torch
from places import ROOT

ROWS, PARTS, STEPS, WORDS = 16, 2, 7, 11


class Policy(torch.nn.Module):
    """Logits [B, T, WORDS] from the token before."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(WORDS, WORDS)

    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(logits=self.table(input_ids))


def part(rank, step):
    """Half of a process's batch. The padding of the prompts differs between processes, the prompts do not."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    width = 3 + rank
    prompts = torch.zeros(ROWS, width, dtype=torch.long)
    mask = torch.zeros(ROWS, width, dtype=torch.long)
    prompts[:, -2], prompts[:, -1] = 2, 3 + torch.arange(ROWS) % 4
    mask[:, -2:] = 1
    return {
        "prompt_ids": prompts,
        "prompt_mask": mask,
        "completion_ids": torch.randint(3, WORDS, (ROWS, 5), generator=draw),
        "completion_mask": torch.ones(ROWS, 5, dtype=torch.long),
        "advantages": torch.where(torch.arange(ROWS) % 2 == 0, 1.0, -1.0),
        "rewards": torch.where(torch.arange(ROWS) % 2 == 0, 1.0, 0.0),
        "wrote": torch.ones(ROWS, 5, dtype=torch.long),
    }


class Trainer:
    """GRPOTrainer, as far as the callback uses it."""

    def __init__(self, args):
        self.model = Policy()
        self.args = args

    def _get_per_token_logps_and_entropies(self, model, ids, mask, width, batch_size):
        logits = torch.cat([model(part, None).logits for part in ids.split(batch_size)])
        logp = torch.log_softmax(logits[:, -width - 1 : -1], -1)
        return logp.gather(-1, ids[:, -width:].unsqueeze(-1)).squeeze(-1), None, None

    def _calculate_rewards(self):
        raise NotImplementedError

    _generate_and_score_completions = _compute_loss = _calculate_rewards


def main(url, spool):
    file = ROOT / "examples" / "trl_callback.py"
    spec = importlib.util.spec_from_file_location("trl_callback", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    args = SimpleNamespace(process_index=rank, per_device_train_batch_size=8)
    callback = module.LikelihoodCallback(url, "two", spool_dir=spool)
    callback.attach(Trainer(args))
    state = SimpleNamespace(global_step=0)
    callback.on_train_begin(args, state, None)
    for step in range(1, STEPS + 1):
        callback.trainer._buffered_inputs = [part(rank, step) for _ in range(PARTS)]
        callback.on_pre_optimizer_step(args, state, None)
        with torch.no_grad():
            callback.trainer.model.table.weight.mul_(0.9)
        state.global_step = step
        callback.on_step_end(args, state, None)
        callback.on_log(args, state, None, logs={"reward": 0.25 + rank, "epoch": 1.0})
    callback.on_train_end(args, state, None)


if __name__ == "__main__":
    main(*sys.argv[1:])
