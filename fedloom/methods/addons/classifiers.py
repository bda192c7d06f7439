"""scikit-learn's linear classifiers as a linear layer: for weak devices, and few samples."""

from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

NEVER = -1e9
"""The logit of a class without samples."""


@torch.no_grad()
def write_linear(linear: nn.Linear, kind: Literal["svm", "logreg"], z: Tensor, y: Tensor) -> None:
    """Fits scikit-learn's classifier and writes it into a linear layer.

    Classes without samples are never predicted; with one class the answer is constant.
    """
    from sklearn.linear_model import LogisticRegression  # here: it takes 70 MB that most runs do not need
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
        if len(seen) == 2:  # scikit-learn gives the second class's side only
            coefficients = np.concatenate([-coefficients, coefficients]) / 2
            intercepts = np.concatenate([-intercepts, intercepts]) / 2
        weight[seen], bias[seen] = coefficients, intercepts
    linear.weight.copy_(torch.from_numpy(weight))
    linear.bias.copy_(torch.from_numpy(bias))
