"""Whether Hugging Face's Trainer divides a loss by its number of steps.

Old versions always did. New ones do not where the model's forward takes loss arguments, as those of its own language
models do: they count on the model to divide by `num_items_in_batch`. So it is sure in one case alone: the model is a
class of the file, whose forward takes no `**kwargs`.
"""

import ast

from bigbatch.lint.reading.program import Program, dotted
from bigbatch.lint.reading.trees import nodes_in

_SAYS_OTHERWISE = {"accepts_loss_kwargs", "model_accepts_loss_kwargs", "loss_is_scaled_for_ga", "compute_loss_func"}


def surely_divides(program: Program) -> bool:
    """Tell whether every model that the file hands to a Trainer leaves the dividing to it."""
    keywords = {word.arg for call in program.calls for word in call.keywords}
    if (program.words | keywords) & _SAYS_OTHERWISE:
        return False
    models = [_model_of(call) for call in program.calls if _is_trainer(program, dotted(call.func))]
    return bool(models) and all(_is_plain(program, model) for model in models)


def _is_trainer(program: Program, name: str) -> bool:
    bases = program.bases(program.classes[name]) if name in program.classes else {name}
    return any(base.endswith("Trainer") for base in bases)


def _model_of(call: ast.Call) -> ast.expr | None:
    named = next((word.value for word in call.keywords if word.arg == "model"), None)
    return named or (call.args[0] if call.args else None)


def _is_plain(program: Program, model: ast.expr | None) -> bool:
    """Tell whether a model is of a class of the file whose forward takes no other arguments than it names."""
    if isinstance(model, ast.Name):
        made = [
            each.value
            for each in nodes_in(program.tree)
            if isinstance(each, ast.Assign) and any(dotted(target) == model.id for target in each.targets)
        ]
        return bool(made) and all(isinstance(each, ast.Call) and _is_plain(program, each) for each in made)
    owner = program.classes.get(dotted(model.func)) if isinstance(model, ast.Call) else None
    forward = program.method(owner, "forward") if owner is not None else None
    return forward is not None and forward.args.kwarg is None
