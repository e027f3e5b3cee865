"""Which weights a model has: Hugging Face names and shapes, from its config alone."""

from __future__ import annotations

from collections.abc import Mapping

from services.common.loading.quick_transformers import skip_scikit_learn


def model_shapes(model_path: str) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Names and shapes of a model folder's parameters, and the names that are tied to another (these may be
    left out)."""
    skip_scikit_learn()
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    unique = {name: tuple(p.shape) for name, p in model.named_parameters()}
    everything = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    return everything, everything.keys() - unique.keys()


def shape_problem(
    sent: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]], tied: set[str], version: int
) -> str | None:
    """The names that are missing, unknown, or of another shape; None where the weights fit the model."""
    missing = sorted(shapes.keys() - tied - sent.keys())
    unknown = sorted(sent.keys() - shapes.keys())
    other = sorted(name for name in sent.keys() & shapes.keys() if tuple(sent[name]) != shapes[name])
    complaints = [
        f"{what} {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
        for what, names in (("missing", missing), ("unknown", unknown))
        if names
    ]
    complaints += [
        f"{name} has shape {list(sent[name])}, the model has {list(shapes[name])}" for name in other[:3]
    ]
    if not complaints:
        return None
    return f"weights of version {version} are not this model's: {'; '.join(complaints)}"
