"""Fold batch norms into the convolutions before them, for inference."""

import itertools
from typing import TypeVar

from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

Network = TypeVar("Network", bound=nn.Module)


def fold_batch_norms(network: Network) -> Network:
    """Fold each batch norm that is listed right after a convolution into it, in place.

    The network must be in evaluation mode, and should not be trained further afterwards. In our networks each
    such norm does follow its convolution. For other networks, compare the results.

    Returns:
        the network itself.

    Example:
        >>> import softfree, timm
        >>> model = softfree.fold_batch_norms(timm.create_model("softfree_tiny").eval())
        >>> any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
        False
    """
    if network.training:
        raise ValueError("network must be in evaluation mode: call network.eval() first")
    for parent in list(network.modules()):
        children = list(parent.named_children())
        for (first, conv), (second, norm) in itertools.pairwise(children):
            if not isinstance(conv, nn.Conv2d) or not isinstance(norm, nn.BatchNorm2d):
                continue
            if norm.num_features != conv.out_channels or norm.running_mean is None:
                continue
            setattr(parent, first, fuse_conv_bn_eval(conv, norm))
            # timm's norms may hold a dropout and an activation.
            rest = [getattr(norm, part, None) for part in ("drop", "act")]
            kept = [part for part in rest if isinstance(part, nn.Module)]
            setattr(parent, second, nn.Sequential(*kept) if kept else nn.Identity())
    return network
