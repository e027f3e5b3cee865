"""Whether questions become prompts that fit, and trajectories that can be trained on."""

from __future__ import annotations

from typing import Any

from services.common.errors import UserError
from services.common.loading.user_code import is_import_path
from services.contracts import Question
from services.rollout.worker.loop import prompt_of
from services.rollout.worker.templates import Template, make_template
from services.settings import RolloutSettings
from trainer.session.preflight.template_trial import try_template


def check_prompts(
    key: str,
    questions: list[Question],
    tokenizer: Any,
    settings: RolloutSettings,
    *,
    trained: bool = False,
) -> None:
    """Raises UserError for the first question whose prompt is too long, and for a template whose trajectories
    cannot be trained on where they are to be, and a user's own that fails. `key` says where questions are
    from."""
    template = make_template(settings.template, tokenizer, settings)
    if trained:
        check_one_sequence(template, settings)
    if questions and is_import_path(settings.template):
        try_template(template, settings, questions[0])
    for question in questions:
        try:
            prompt_of(question, template, settings)
        except UserError as e:
            raise UserError(f"{key}: {e}") from None


def check_one_sequence(template: Template, settings: RolloutSettings) -> None:
    """Raises UserError where a turn is shown without the thoughts of earlier ones: there is no one sequence
    of tokens to train on."""
    if getattr(template, "drops_thoughts", False):
        raise UserError(
            f"rollout.template={settings.template}: the model's chat template drops the thoughts of earlier "
            "turns, so that the tokens of a turn are no prefix of those of the next, and a trajectory is no "
            "one sequence to train on; accepted is rollout.thoughts=keep, which leaves them in"
        )
