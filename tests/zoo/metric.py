# ruff: noqa: E501, D102, D103, I001 - a row of a table is a line
# fmt: off
"""Losses of pytorch-metric-learning, sentence-transformers and torchmetrics; networks of PyG."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import counted
from bigbatch.errors import CoupledLoss, LossError
from tests.zoo.libraries import Library
from tests.zoo.program import EXACT, Expected, Program, refused, Rows
from tests.zoo.samples import CLASSES, graphs, join_graphs, mlp, parts, rows

L = Library("pytorch_metric_learning.losses")
MINERS = Library("pytorch_metric_learning.miners")
G = Library("torch_geometric.nn")
S = Library("sentence_transformers.sentence_transformer.losses")
AUDIO = Library("torchmetrics.functional.audio")
COUPLED = refused(CoupledLoss, "across")
TOLD = refused(LossError, "count")  # no graph says whose nodes an index adds up: counted(...) settles it
METRIC_LEARNING, PYG, SENTENCES = "pytorch_metric_learning", "torch_geometric", "sentence_transformers"

def proxies(name: str, kind: str, expected: Expected = EXACT, **settings: Any) -> Program:
    """A loss with weights of its own: one or more per class."""
    return Program(f"pml-{name}", lambda: parts(net=mlp(6, 4), loss=getattr(L, kind)(num_classes=CLASSES, embedding_size=4, **settings)), rows, lambda m, b: m["loss"](m["net"](b["x"]), b["label"]), METRIC_LEARNING, accumulator=expected, big_step=expected)

def pairs(name: str, kind: str, expected: Expected = COUPLED, *, miner: str = "", **settings: Any) -> Program:
    """A loss of pairs within the batch."""

    def loss(model: Any, b: Rows) -> Tensor:
        out = model(b["x"])
        mined = [getattr(MINERS, miner)()(out, b["label"])] if miner else []
        return getattr(L, kind)(**settings)(out, b["label"], *mined)

    return Program(f"pml-{name}", lambda: mlp(6, 4), rows, loss, METRIC_LEARNING, accumulator=expected, big_step=expected)

class Encoder(nn.Module):
    """What losses of sentence-transformers call."""
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(6, 4)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:  # the embedding beside the features
        return {**features, "sentence_embedding": self.net(features["x"])}

def sentence_loss(name: str, kind: str, columns: tuple[str, ...], label: str = "", *, expected: Expected = EXACT, unseen: str = "") -> Program:
    """A loss of sentence-transformers over an encoder."""

    def loss(model: Any, b: Rows) -> Tensor:
        criterion = getattr(S, kind)(model)
        return criterion([{"x": b[column]} for column in columns], b[label] if label else None)

    return Program(f"sentence-{name}", Encoder, rows, loss, SENTENCES, accumulator=expected, big_step=expected, unseen=unseen)

def convolution(layer: str, inputs: int) -> Any:  # a layer of PyG
    return G.GINConv(nn.Linear(inputs, 8)) if layer == "GINConv" else getattr(G, layer)(inputs, 8)

def network(name: str, layer: str, pool: str = "global_mean_pool") -> Program:
    """Two layers of PyG, a pooling, a head, and a regression of one number per graph."""

    def loss(model: Any, b: Rows) -> Tensor:
        x = model["second"](model["first"](b["x"], b["edges"]).relu(), b["edges"])
        return F.mse_loss(model["head"](getattr(G, pool)(x, b["batch"], b["graphs"]))[:, 0], b["y"])

    return Program(f"pyg-{name}", lambda: parts(first=convolution(layer, 6), second=convolution(layer, 8), head=nn.Linear(8, 1)), graphs, loss, PYG, collate=join_graphs)

METRIC = [
    proxies("arcface", "ArcFaceLoss"),
    proxies("proxy-anchor", "ProxyAnchorLoss", COUPLED),
    pairs("supcon", "SupConLoss"),
    pairs("triplet-with-miner", "TripletMarginLoss", miner="BatchHardMiner"),
    pairs("multi-similarity-with-miner", "MultiSimilarityLoss", miner="MultiSimilarityMiner"),
    sentence_loss("cosine-similarity", "CosineSimilarityLoss", ("x", "x2"), "binary"),
    sentence_loss("multiple-negatives", "MultipleNegativesRankingLoss", ("x", "x2"), expected=COUPLED),
    sentence_loss("online-contrastive", "OnlineContrastiveLoss", ("x", "x2"), "binary", unseen="coupled-samples"),
    Program("torchmetrics-si-sdr", lambda: mlp(64, 64), rows, lambda m, b: -AUDIO.scale_invariant_signal_distortion_ratio(m(b["wave"]), b["clean"]).mean(), "torchmetrics"),
    network("gcn", "GCNConv"),
    network("gin", "GINConv", "global_add_pool"),
    network("sage-max-pool", "SAGEConv", "global_max_pool"),
    Program("pyg-node-classification", lambda: G.GCN(6, 8, 2, CLASSES), graphs, lambda m, b: F.cross_entropy(m(b["x"], b["edges"]), b["tags"]), PYG, collate=join_graphs, accumulator=TOLD, big_step=TOLD),
    Program("pyg-node-classification, told", lambda: G.GCN(6, 8, 2, CLASSES), graphs, lambda m, b: counted(F.cross_entropy(m(b["x"], b["edges"]), b["tags"]), len(b["tags"])), PYG, collate=join_graphs),
]
