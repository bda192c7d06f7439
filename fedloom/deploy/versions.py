"""What to do if both sides have different versions. Does not import torch, because the SuperLink process uses it."""


def same_version(what: str) -> str:
    """Return the remedy for a difference of versions.

    Args:
        what: What differs: protocol, fedloom, code or torch.
    """
    if what == "code":
        return "install the same version of fedloom on both sides, without local changes of its files"
    return "install the same version of fedloom and torch on both sides"
