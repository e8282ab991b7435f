"""The last block of a GPT in closed form: what follows it (norm, unembedding, loss) looks at one token at a time.

A ViT takes the mean of its tokens, so its loss is no sum over tokens, and none of its blocks has this form. Beware of
`.outer`: it is split at the output of the block, and where a norm follows, H_o of the model is split behind that.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from evolute.calculus import closed_form, losses
from evolute.calculus.closed_form import ClosedForm
from evolute.errors import StudyError
from evolute.studies.subjects import Moment
from evolute.zoo import GPT
from evolute.zoo.data import IGNORED


def last_block(moment: Moment) -> ClosedForm:
    """The Hessian of the moment's loss in the weights of the last block, exact.

    >>> from evolute.studies.subjects import Subject, at
    >>> moment = at(Subject("gpt_english", width=4, heads=1, layers=1, samples=2), 0)
    >>> abs(last_block(moment).value - moment.objective.value()) < 1e-12
    True
    """
    model, (tokens, labels) = moment.model, moment.sample
    if not isinstance(model, GPT):
        raise StudyError(f"expected a GPT, whose loss is a sum over tokens; got a {type(model).__name__}.")
    share = labels.numel() / int((labels != IGNORED).sum())  # the closed form divides by all tokens

    def loss(z: Tensor, label: Tensor) -> Tensor:
        z = z if model.norm is None else model.norm(z)
        return share * F.cross_entropy(model.unembed(z), label, ignore_index=IGNORED, reduction="sum")

    with torch.no_grad():
        x = model.embed(tokens) + model.position.weight[: tokens.shape[1]]
        for layer in model.layers[:-1]:
            x = layer(x)
    return closed_form(model.layers[-1], x, labels, losses.autodiff(loss))
