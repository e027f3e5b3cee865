"""The losses at work: batches of real trajectories, micro-batches, and the displacement that LLDS is for."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

import trainer.algorithms
from services.contracts import Action, Observation, Question, TokenBatch, Trajectory
from trainer.algorithm_names import PolicyLossKind
from trainer.algorithms import group_advantages, kl_k3, llds_loss, policy_loss, token_logprobs

QUESTION = Question("q", "who?", ("nobody",), "made_up")


def _trajectories(seed: int) -> list[Trajectory]:
    """Four prompts, three samples each in mixed order; each of one to four turns."""
    rng = np.random.default_rng(seed)
    out = []
    for i in rng.permutation(12):
        segments: list[Action | Observation] = []
        turns = int(rng.integers(1, 5))
        for turn in range(turns):
            ids = rng.integers(0, 50, rng.integers(1, 7)).tolist()
            last = turn == turns - 1
            segments.append(
                Action(ids, (-rng.random(len(ids))).tolist(), turn, "answer" if last else "search", "text")
            )
            if not last:
                segments.append(Observation(rng.integers(0, 50, rng.integers(1, 6)).tolist(), "documents"))
        prompt = rng.integers(0, 50, rng.integers(2, 8)).tolist()
        out.append(Trajectory(f"t{i}", f"g{i // 3}", QUESTION, prompt, segments, "answer"))
    return out


def _padded(batch: TokenBatch, column: np.ndarray, fill: float) -> torch.Tensor:
    rows = [torch.from_numpy(column[batch.row(b)]) for b in range(len(batch))]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)


@pytest.mark.parametrize("seed", range(5))
def test_mask_action_ids_and_advantages_of_real_trajectories_equal_plain_loops(seed):
    trajectories = _trajectories(seed)
    rewards = [float(int(t.uid[1:]) % 5 == 0) for t in trajectories]
    batch = TokenBatch.of(trajectories)

    at = 0
    for row, t in enumerate(trajectories):
        assert batch.offsets[row] == at
        wanted = [(token, -1, 0.0) for token in t.prompt_ids]
        action = 0
        for segment in t.segments:
            if isinstance(segment, Action):
                for token, logp in zip(segment.token_ids, segment.logprobs, strict=True):
                    wanted.append((token, action, logp))
                action += 1
            else:
                for token in segment.token_ids:
                    wanted.append((token, -1, 0.0))
        for token, action_id, logp in wanted:
            assert batch.token_ids[at] == token and batch.action_ids[at] == action_id
            assert batch.logp_sampler[at] == np.float32(logp)
            at += 1
    assert batch.offsets[-1] == at == len(batch.token_ids)

    names = sorted({t.group for t in trajectories})
    got = group_advantages(
        torch.tensor(rewards), torch.tensor([names.index(t.group) for t in trajectories]), "grpo"
    )
    for row, t in enumerate(trajectories):
        group = [r for r, other in zip(rewards, trajectories, strict=True) if other.group == t.group]
        mean = sum(group) / 3
        std = (sum((r - mean) ** 2 for r in group) / 2) ** 0.5
        assert got[row].item() == pytest.approx(
            (rewards[row] - mean) / (std + 1e-6) if std else 0.0, rel=1e-6
        )

    # One scalar at the end of the whole chain: the LLDS sum of the padded batch against loops over the
    # trajectories.
    old = _padded(batch, batch.logp_sampler, 0.0)
    new = old - 0.3 * torch.randn(old.shape, generator=torch.Generator().manual_seed(seed))
    term = llds_loss(new, old, got, _padded(batch, batch.action_ids, -1).long())
    total = count = 0.0
    for row, t in enumerate(trajectories):
        position = len(t.prompt_ids)
        for segment in t.segments:
            drops = (old[row] - new[row])[position : position + len(segment.token_ids)].tolist()
            position += len(drops)
            if isinstance(segment, Action) and got[row] >= 0:
                count += len(drops)
                total += sum(max(0.0, d) for d in drops) if sum(drops) > 0 else 0.0
    assert term.loss_sum.item() == pytest.approx(total, rel=1e-5) and term.count == count


class _Policy(torch.nn.Module):
    """Embedding, running mean, head: each position sees those before it."""

    def __init__(self, seed: int, vocabulary: int = 50, width: int = 8) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.embed = torch.nn.Parameter(torch.randn(vocabulary, width, generator=g, dtype=torch.float64))
        self.head = torch.nn.Parameter(torch.randn(vocabulary, width, generator=g, dtype=torch.float64))

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(1, tokens.shape[1] + 1)[:, None]
        before = self.embed[tokens].cumsum(1) / steps
        return torch.cat([torch.zeros_like(before[:, :1]), before[:, :-1]], 1)

    def logp(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(tokens)
        return token_logprobs(hidden.flatten(0, 1), self.head, tokens.flatten(), chunk_tokens=16)[0].view(
            tokens.shape
        )


@pytest.mark.parametrize("kind", get_args(PolicyLossKind))
def test_a_step_has_the_same_gradient_in_micro_batches_of_any_size(kind):
    trajectories = _trajectories(1)
    batch, policy = TokenBatch.of(trajectories), _Policy(1)
    advantages = torch.tensor([float(int(t.uid[1:]) % 3 - 1) for t in trajectories], dtype=torch.float64)
    old_policy = _Policy(1)
    with torch.no_grad():
        old_policy.head += 0.05 * torch.randn(
            50, 8, generator=torch.Generator().manual_seed(9), dtype=torch.float64
        )

    def gradient(size: int) -> list[torch.Tensor]:
        parts = [batch.take(list(range(i, min(i + size, 12)))) for i in range(0, 12, size)]
        sums, counts = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
        for i, part in enumerate(parts):
            tokens, ids = _padded(part, part.token_ids, 0).long(), _padded(part, part.action_ids, -1).long()
            logp, old, a = (
                policy.logp(tokens),
                old_policy.logp(tokens).detach(),
                advantages[i * size : (i + 1) * size],
            )
            terms = [
                policy_loss(kind, logp, old, a, ids, clip_low=0.2, clip_high=0.2, max_response_tokens=64),
                llds_loss(logp, old, a, ids),
                kl_k3(logp, old, ids),
            ]
            sums = [s + t.loss_sum for s, t in zip(sums, terms, strict=True)]
            counts = [c + t.count for c, t in zip(counts, terms, strict=True)]
        loss = sums[0] / counts[0] + 0.2 * sums[1] / counts[1] + 0.001 * sums[2] / counts[2]
        return list(torch.autograd.grad(loss, list(policy.parameters())))

    whole = gradient(12)
    assert all(g.abs().max() > 1e-4 for g in whole)
    for size in (1, 2, 4, 5):
        for a, b in zip(gradient(size), whole, strict=True):
            assert torch.allclose(a, b, rtol=1e-10, atol=1e-14)


def test_logits_of_prompt_and_observation_positions_get_a_gradient_of_exactly_0():
    trajectories = _trajectories(2)
    batch = TokenBatch.of(trajectories)
    tokens, ids = _padded(batch, batch.token_ids, 0).long(), _padded(batch, batch.action_ids, -1).long()
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(*tokens.shape, 8, generator=g).requires_grad_()
    logp, _ = token_logprobs(hidden.flatten(0, 1), torch.randn(50, 8, generator=g), tokens.flatten())
    logp = logp.view(tokens.shape)
    old, advantages = logp.detach() + 0.1 * torch.randn(logp.shape, generator=g), torch.ones(12)
    loss = policy_loss("grpo", logp, old, advantages, ids, clip_low=0.2, clip_high=0.2).loss_sum
    loss = loss + llds_loss(logp, old, advantages, ids).loss_sum + kl_k3(logp, old, ids).loss_sum
    (grad,) = torch.autograd.grad(loss, hidden)
    assert (grad[ids < 0] == 0).all() and (grad[ids >= 0].abs().sum(-1) > 0).any()


def _train_toy(llds_lambda: float, seed: int) -> list[float]:
    """Mean log-prob of the right answers, before each of 60 batches and at the end.

    A linear softmax policy over 24 tokens. Four prompts; one answer of five is right (search, answer). The
    wrong ones search the same, twice, in nearly the same context, and then answer wrongly: their penalty
    falls on the tokens that the right answer needs. GRPO at four optimiser steps a batch, pi_old taken anew
    for each batch.
    """
    g = torch.Generator().manual_seed(seed)
    width, vocabulary, length = 16, 24, 8
    hidden, ids, tokens = (
        torch.zeros(20, length, width),
        torch.full((20, length), -1),
        torch.zeros(20, length, dtype=torch.long),
    )
    for prompt in range(4):
        context = torch.randn(3, width, generator=g)
        search = torch.randint(0, vocabulary, (2,), generator=g)
        right = int(torch.randint(0, vocabulary, (), generator=g))
        for member in range(5):
            row, at, turns = 5 * prompt + member, 0, 1 if member == 0 else 2
            for turn in range(turns):
                hidden[row, at : at + 2] = context[:2] + 0.3 * torch.randn(2, width, generator=g)
                ids[row, at : at + 2], tokens[row, at : at + 2] = turn, search
                at += 3  # an observation follows
            hidden[row, at] = context[2] + 0.3 * torch.randn(width, generator=g)
            ids[row, at], tokens[row, at] = turns, right if member == 0 else (right + member) % vocabulary
    advantages = group_advantages((torch.arange(20) % 5 == 0).float(), torch.arange(20) // 5, "grpo")
    weight = (0.3 * torch.randn(vocabulary, width, generator=g)).requires_grad_()
    preserved = (ids >= 0) & (advantages >= 0)[:, None]
    optimizer = torch.optim.Adam([weight], lr=0.02)

    def logp() -> torch.Tensor:
        return token_logprobs(hidden.flatten(0, 1), weight, tokens.flatten())[0].view(20, length)

    curve = []
    for _ in range(60):
        old = logp().detach()
        curve.append(old[preserved].mean().item())
        for _ in range(4):
            new = logp()
            term = policy_loss("grpo", new, old, advantages, ids, clip_low=0.2, clip_high=0.2)
            loss = term.loss_sum / term.count
            if llds_lambda:
                pull = llds_loss(new, old, advantages, ids)
                loss = loss + llds_lambda * pull.loss_sum / pull.count
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [*curve, logp()[preserved].mean().item()]


@pytest.mark.parametrize("seed", range(4))
def test_grpo_alone_displaces_right_answers_and_llds_holds_them(seed):
    """Right answers have the highest advantage of their groups, yet plain GRPO makes them less likely."""
    off, on = _train_toy(0.0, seed), _train_toy(0.2, seed)
    floor = off[0] - 1.0  # nats a token
    assert on[0] == off[0]
    assert off[-1] < floor < min(on)


def test_the_package_imports_torch_and_the_standard_library_alone():
    for path in Path(trainer.algorithms.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                root = name.split(".")[0]
                assert (
                    root == "torch"
                    or root in sys.stdlib_module_names
                    or name == "trainer.algorithm_names"
                    or name.startswith("trainer.algorithms")
                ), (path, name)
    code = (
        "import sys, trainer.algorithms; print([m for m in ('services', 'ray', 'deepspeed', 'vllm', "
        "'pydantic') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
