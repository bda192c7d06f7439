"""Linear classifiers fitted by scikit-learn and stored in a linear layer, for weak devices and few samples."""

from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

NEVER = -1e9
"""Logit of a class without samples."""


@torch.no_grad()
def write_linear(linear: nn.Linear, kind: Literal["svm", "logreg"], z: Tensor, y: Tensor) -> None:
    """Fit a scikit-learn classifier and write it into a linear layer.

    Classes without samples are never predicted. If all samples are of one class, that class is always predicted.

    Args:
        linear: The layer, [C, D]; overwritten.
        kind: `svm` (LinearSVC) or `logreg` (LogisticRegression).
        z: Features [N, D].
        y: Labels [N].
    """
    from sklearn.linear_model import LogisticRegression  # imported here: it takes 70 MB that most runs do not need
    from sklearn.svm import LinearSVC

    seen, labels = np.unique(y.cpu().numpy(), return_inverse=True)
    weight = np.zeros(tuple(linear.weight.shape))
    bias = np.full(len(weight), NEVER)
    bias[seen] = 0
    if len(seen) > 1:
        model = (
            LinearSVC(random_state=0, max_iter=10_000)
            if kind == "svm"
            else LogisticRegression(max_iter=1000, random_state=0)
        )
        fitted = model.fit(z.double().cpu().numpy(), labels)
        coefficients, intercepts = fitted.coef_, fitted.intercept_
        if len(seen) == 2:  # scikit-learn returns coefficients of the second class only
            coefficients = np.concatenate([-coefficients, coefficients]) / 2
            intercepts = np.concatenate([-intercepts, intercepts]) / 2
        weight[seen], bias[seen] = coefficients, intercepts
    linear.weight.copy_(torch.from_numpy(weight))
    linear.bias.copy_(torch.from_numpy(bias))
