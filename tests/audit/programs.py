# ruff: noqa: E501  (a row of a table is a line)
# fmt: off
"""Programs that nobody has written yet: a model's output, one to six operations, a loss; drawn from a seed.

A program is the text of a loss function, so that one that fails is printed as it can be run again. A chain is drawn
operation by operation: each is tried on two batches of different sizes, which tells where the samples lie. Operations
that choose or weigh rows of the batch by their number are left out: no graph shows them (`UNSEEN` in the table of
operations). Layers come before all that could mix samples: below the last layer lies the model, which is not read.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.audit.judge import Batch, LossFunction, Verdict, adds_up, judge, judge_big_step, plain
from tests.support.samples import join

STEPS, CLASSES, FEATURES, ITEMS = 3, 4, 5, 7
PROBES = (5, 7)  # no size of anything else, so that the samples' axis is the one that has them

class Model(nn.Module):
    """Outputs of many kinds, and parameters to set them against."""

    def __init__(self) -> None:
        super().__init__()
        by = torch.Generator().manual_seed(2)

        def parameter(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(size, generator=by, dtype=torch.float64) * 0.7)


        self.token, self.flat = parameter(CLASSES, FEATURES), parameter(STEPS * CLASSES, FEATURES)
        self.vector, self.column = parameter(CLASSES, FEATURES), parameter(1, FEATURES)
        self.kernel, self.bias = parameter(CLASSES, FEATURES, 2), parameter(CLASSES)
        self.table, self.square = parameter(ITEMS, CLASSES), parameter(CLASSES, CLASSES)
        self.p, self.s = parameter(CLASSES), parameter()
        self.register_buffer("frozen", torch.randn(CLASSES, CLASSES, generator=by, dtype=torch.float64))


SOURCES = {
    "F.linear(b['x'], m.token, m.bias)": 6,  # (n, T, C)
    "F.linear(b['x'].mean(1), m.flat).view(n, 3, 4)": 4,
    "F.conv1d(F.pad(b['x'].mT, (0, 1)), m.kernel).mT": 1,
    "F.layer_norm(F.linear(b['x'], m.token), (4,), m.p)": 1,
    "F.linear(b['x'], m.token).tanh() @ m.frozen": 1,
    "F.linear(b['x'][:, 0], m.vector, m.bias)": 3,  # (n, C)
    "F.embedding(b['row'], m.table)": 1,
    "m.table[b['row']]": 1,
    "F.linear(b['x'][:, 0], m.column)": 2,  # (n, 1)
    "F.linear(b['x'][:, 0], m.column).squeeze(1)": 1,  # (n,)
}

# {d}, {e}: dimensions; {o}: the samples' axis; {n1}: a view that puts (n,) there; {f}: the size of {d}
POINTWISE = """x.tanh() | F.softplus(x) | x.sigmoid() | F.gelu(x) | x.square() | x.abs() + 0.1 | x.clamp(-0.8, 1.1) | 0.5 * x + 0.1
(x.abs() + 1).log() | x * m.s | x + m.s.exp() | torch.where(x > 0, x, x.exp() - 1) | F.leaky_relu(x) | -x | x.exp().clamp(max=5) | x / 2
torch.maximum(x, x.sin()) | x * x.detach().sigmoid() | x.nan_to_num() | x.masked_fill(x < 0, 0.0) | torch.addcmul(x, x.sin(), x.cos())"""
DATA = """x * b['w'].view({n1}) | x - b['w'].view({n1}) | torch.where(b['pick'].view({n1}), x, 0.0) | x.masked_fill(b['pick'].view({n1}), 0.0) | x * b['pick'].view({n1})
torch.where(b['pick'].view({n1}), x, x.sin()) | F.mse_loss(x, b['w'].view({n1}).expand_as(x), reduction='none') | x.pow(2) / (1 + b['w'].view({n1}))"""
ALONG = """x.softmax({d}) | x.log_softmax({d}) | x.cumsum({d}) | x.sort({d}).values | x - x.mean({d}, keepdim=True) | x / (1 + x.norm(dim={d}, keepdim=True)) | x - x.amax({d}, keepdim=True)
x / (1 + x.std({d}, keepdim=True, correction=0)) | F.normalize(x, dim={d}) | x * x.roll(1, {d}) | x * x.logsumexp({d}, keepdim=True)
x.mean({d}) | x.sum({d}) | x.amax({d}) | x.logsumexp({d}) | x.norm(dim={d}) | x.prod({d}) | x.std({d}, correction=0) | x.median({d}).values | x.max({d}).values
torch.cat([x, x.tanh()], {d}) | torch.stack([x, x.sin()], {d}) | torch.stack([x, x.sin()], {d}).softmax({d}) | x.cummax({d}).values | x.topk(1, {d}).values
torch.renorm(x, 2, {d}, 0.7) | torch.cat([x, x.tanh()], {d}).chunk(2, {d})[1] * x"""
INNER = """x.select({d}, 0) | x.select({d}, -1) | x.narrow({d}, 1, {f} - 1) - x.narrow({d}, 0, {f} - 1) | x.narrow({d}, 0, {f} - 1) | x.index_select({d}, torch.tensor([0, {f} - 1])) | x.unbind({d})[0] * x.unbind({d})[-1]
x * x.select({d}, 0).unsqueeze({d}) | x.unfold({d}, 2, 1).mean(-1) | x.roll(1, {d}) | x.flip({d}) | x.repeat_interleave(2, {d}) | x.gather({d}, torch.zeros_like(x).long()) | x.argmax({d}, keepdim=True) * x
x.index_fill({d}, torch.tensor([0]), 0.0) | x.squeeze({d}) | x.narrow({d}, 0, 1).squeeze({d}) | torch.stack([part * (i + 1) for i, part in enumerate(x.unbind({d}))], {d}) | x.narrow({d}, 0, 1) - x"""
# Rows put together with rows of the same samples, and told apart again: samples first.
PAIRS = """torch.stack([row.softmax(-1) for row in x.unbind(0)]) | torch.sub(*torch.cat([x, x.tanh()]).chunk(2)) | torch.cat([x, x.tanh()]).view(2, *x.shape).softmax(0)[0] | torch.stack([x, x.tanh()]).softmax(0)[0] | torch.cat([x, x.tanh()])[:n] * torch.cat([x, x.tanh()])[n:]
x.flatten(1).softmax(1).view_as(x) | x.movedim(-1, 0).softmax(0).movedim(0, -1) | torch.cat([c * (i + 1) for i, c in enumerate(x.chunk(2, -1))], -1) | torch.cat([x[:, 1:], x[:, :1].tanh()], 1)"""
COUPLING_PAIRS = """torch.cat([x, x.tanh()]).view(n, 2, *x.shape[1:]).prod(1) | torch.cat([x, x.tanh()])[::2] * torch.cat([x, x.tanh()])[1::2] | torch.cat([x, x.tanh()]).view(n, 2, *x.shape[1:])[:, 0] * x | torch.mul(*torch.cat([x, x.tanh()])[torch.arange(2 * n).flip(0).roll(1)].chunk(2))
x + x.flatten(0, 1).flip(0).view_as(x) | x.flatten(0, 1).roll(1, 0).view_as(x) * x | x.transpose(0, 1).flatten(1).softmax(1).view_as(x.transpose(0, 1)) | x.reshape(1, -1).softmax(1).view_as(x)"""
COUPLING = """x * x.flip({o}) | x - x.narrow({o}, 0, 1) | x * x.narrow({o}, 0, 1).sin() | x - x.mean() | x / (1 + x.norm()) | x.select({o}, 0) * x.select({o}, -1) | x - x.amax() | x.softmax({o}) * x
(x.movedim({o}, 0)[:, None] - x.movedim({o}, 0)[None]).abs().mean(1) | (x.movedim({o}, 0).flatten(1) @ x.movedim({o}, 0).flatten(1).T).softmax(1) | x.flatten().softmax(0) | x.movedim({o}, 0)[torch.arange(n).flip(0)].movedim(0, {o}) * x
x.movedim({o}, 0)[:, None] * b['w'][None].view(1, n, *[1] * (x.dim() - 1)) | torch.cdist(x.movedim({o}, 0).flatten(1), x.movedim({o}, 0).flatten(1)) | x.flatten().roll(1).view_as(x) * x"""
SHAPES = """x.transpose({d}, {e}) | x.movedim({d}, {e}) | x.flatten(0, 1) | x.flatten(1) | x.flatten() | x.unsqueeze({d}) | x.unsqueeze(-1) | x.reshape(-1, x.shape[-1]) | x.reshape(n, -1) | x.movedim({o}, 0) | x.flatten(1).view(n, -1, 2) | x.reshape(n, 1, -1) | x.reshape(1, -1)
x.flatten(0, 1).log_softmax(-1).view_as(x) | x.expand(2, *x.shape) | x.unsqueeze(1).expand(-1, 2, *[-1] * (x.dim() - 1))"""
BY_SHAPE = {  # for a shape that begins so: n samples, T steps; C classes last
    "n?": PAIRS,
    "n": "x[b['pick']] | x * b['pick'].view({n1})",
    "nT": "x[b['keep']] | torch.where(b['keep'].view(n, 3, *[1] * (x.dim() - 2)), x, 0.0) | x[torch.arange(n), b['step']] | x * b['u'].view(n, 3, *[1] * (x.dim() - 2)) | x.masked_select(b['keep'].view(n, 3, *[1] * (x.dim() - 2))) | x[:, 0] | x[:, 1:] * x[:, :-1] | x[:, [0, 2]]",
    "nTC": "x - b['d'] | x * b['d'] | x @ x.mT | torch.bmm(x, x.sin().mT) | torch.einsum('nij,nkj->nik', x, x) | (x @ x.sin().mT).softmax(-1) @ x | torch.einsum('ntc,ntc->nt', x, x.sin()) | x @ b['d'].mT | torch.einsum('ntc,nc->nt', x, b['v']) | x - b['v'][:, None] | x.gather(2, b['last'][..., None]).squeeze(2) | x.scatter(2, b['last'][..., None], 0.0) | torch.cdist(x, x.sin()) | x[..., :1] * b['d'] | x.view(n, 2, 6) | x.mT.reshape(n * 4, 3) | F.cosine_similarity(x, b['d'], dim=-1) | F.cross_entropy(x.flatten(0, 1), b['last'].flatten(), reduction='none').view(n, 3) | F.cross_entropy(x.mT, b['last'], reduction='none')",
    "nC": "x - b['v'] | (x * b['v']).sum(-1) | x[torch.arange(n), b['label']] | x.gather(1, b['label'][:, None]) | F.cosine_similarity(x, b['v']) | F.cross_entropy(x, b['label'], reduction='none') | torch.einsum('nc,nc->n', x, b['v']) | x @ x.T | x[:, None] - m.table | (x[:, None] * b['d']).sum(-1)",
    "...C": "x * m.p | x - m.p | F.layer_norm(x, (4,)) | F.rms_norm(x, (4,), m.p) | x / m.p.exp()",
    "n1": "x - b['w'] | x.squeeze(1) | x * b['v'] | F.mse_loss(x.expand(n, n), b['w'].expand(n, n), reduction='none') | torch.where(b['pick'], x, 0.0) | x - x.T | x - b['w'][:, None]",
    "once": "x * y | x + y.tanh() | x - y | torch.cat([x.flatten(1), y.flatten(1)], 1) | x * y.mean()",
}
LAYERS = """x @ m.square | x @ m.frozen | F.linear(x, m.square, m.p) | F.layer_norm(x, (4,), m.p) | x @ m.p | x @ (m.square * m.s) | F.linear(x, m.square.tril()) | x @ m.table.T | torch.cdist(x, m.table) | F.prelu(x, m.s.view(1).abs()) | x + F.linear(x.tanh(), m.square)"""
ENDS = """x.mean() | x.sum() | x.square().mean() | x.tanh().sum() | x.mean(-1).mean() | x.sum(-1).mean() | x.mean({d}).mean() | x.mean({d}).sum() | x.flatten(1).sum(1).mean() | x.flatten(1).mean(1).exp().mean() | x.sum({d}).tanh().mean() | x.sum() / len(x) | x.sum() / x.numel() | x.mean({d}).square().mean() | x.exp().clamp(max=9).mean(-1).log().mean()
F.mse_loss(x, b['w'].view({n1}).expand_as(x)) | F.smooth_l1_loss(x, b['w'].view({n1}).expand_as(x), reduction='sum') | F.binary_cross_entropy_with_logits(x, b['w'].view({n1}).expand_as(x)) | F.mse_loss(x, torch.zeros_like(x)) | (x * b['w'].view({n1})).mean() | F.l1_loss(x, b['w'].view({n1}).expand_as(x)) | (x * b['w'].view({n1})).sum() | -F.logsigmoid(x).mean() | -x.log_softmax(-1).mean() | torch.dot(x.flatten(), x.sin().flatten())"""
ENDS_BY_SHAPE = {
    "nTC": "F.cross_entropy(x.flatten(0, 1), b['last'].flatten()) | F.cross_entropy(x.flatten(0, 1), b['last'].flatten(), ignore_index=1) | F.cross_entropy(x[:, 1:].flatten(0, 1), b['last'][:, 1:].flatten(), m.p.detach().abs()) | F.cross_entropy(x.mT, b['last'], label_smoothing=0.1) | F.mse_loss(x, b['d']) | F.mse_loss(x[b['keep']], b['d'][b['keep']]) | F.kl_div(x.log_softmax(-1), b['d'].softmax(-1), reduction='batchmean') | (x * b['keep'][..., None]).sum() / b['keep'].sum()",
    "nC": "F.cross_entropy(x, b['label']) | F.cross_entropy(x, b['label'], ignore_index=2) | F.multi_margin_loss(x, b['label']) | F.mse_loss(x, b['v']) | F.cosine_embedding_loss(x, b['v'], b['w'].sign()) | F.triplet_margin_loss(x, b['v'], x.sin()) | F.cross_entropy(x @ x.T, torch.arange(n)) | F.mse_loss(x[b['pick']], b['v'][b['pick']])",
    "n1": "F.mse_loss(x.squeeze(1), b['w']) | (x - b['w']).square().mean() | F.binary_cross_entropy_with_logits(x.squeeze(1), b['pick'].double()) | F.mse_loss(x, b['w'][:, None]) | F.margin_ranking_loss(x.squeeze(1), x.sin().squeeze(1), b['w'].sign())",
}
ABOVE = """0.3 * loss | loss.sum() | loss.mean() | loss / 7 | -loss | loss + 0.01 * m.square.square().sum() | m.s.exp() * loss | loss / (2 * m.s.square()) + m.s | torch.stack([loss, 2 * loss]).mean() | loss + 0.1 * loss | loss.view(1).squeeze() | loss + 0.1 * m.p.abs().mean() | loss + 0.5 * x.square().mean() | loss + 0.5 * y.square().mean() | loss + 0.1 * y.sum() | loss + 1e-3 * y.exp().clamp(max=3).mean() | 0.5 * loss + 0.5 * y.tanh().mean()"""

NONLINEAR = """loss.sqrt() | loss * loss | loss.exp() | loss.tanh() | loss * b['w'].mean()"""
REFUSED = {  # each sample is alone, but no count is in the graph; or it is not read yet
    "(x * b['keep'][..., None]).sum() / b['keep'].sum()",
    *("loss / 7", "loss + 0.1 * loss", "torch.stack([loss, 2 * loss]).mean()", "m.table[b['row']]"),
    *("x.unsqueeze(1).expand(-1, 2, *[-1] * (x.dim() - 1))", "x[..., :1] * b['d']", "(x[:, None] * b['d']).sum(-1)"),
    *("x[torch.arange(n), b['step']]", "x.flatten(0, 1).log_softmax(-1).view_as(x)", "x * y.mean()"),
    *("torch.dot(x.flatten(), x.sin().flatten())", "torch.stack([row.softmax(-1) for row in x.unbind(0)])"),
    *("torch.renorm(x, 2, {d}, 0.7)", "x.expand(2, *x.shape)", "x * b['v']", "torch.cdist(x, x.sin())"),
}

def _lines(text: str) -> list[str]:
    return [each.strip() for line in text.splitlines() for each in line.split("|")]

def micro_batches(sizes: Sequence[int], seed: int) -> list[Batch]:
    """Samples: inputs, targets of several shapes, labels, masks, weights."""
    by = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, generator=by, dtype=torch.float64)
    number = partial(torch.randint, generator=by)
    return [{
        "x": normal(n, STEPS, FEATURES), "d": normal(n, STEPS, CLASSES), "v": normal(n, CLASSES), "u": normal(n, STEPS).abs(), "w": normal(n).abs() + 0.1,
        "label": number(CLASSES, (n,)), "step": number(STEPS, (n,)), "last": number(CLASSES, (n, STEPS)), "row": number(ITEMS, (n,)),
        "keep": torch.rand(n, STEPS, generator=by) < 0.6, "pick": torch.rand(n, generator=by) < 0.6,
    } for n in sizes]

@dataclass(frozen=True)
class Program:
    """A loss function as text, and the micro-batches it is tried with."""

    source: str
    lines: tuple[str, ...]
    sizes: tuple[tuple[int, ...], ...]
    seed: int

    @property
    def text(self) -> str:
        """The loss function."""
        body = ["n = len(b['x'])", f"x = y = {self.source}", *self.lines, "return loss"]
        return "def loss_fn(m, b):\n" + "".join(f"    {line}\n" for line in body)

    def __str__(self) -> str:
        return f"from tests.audit.programs import *\n\n{self.text}\nprint(judge(Model(), loss_fn, windows({self.sizes}, {self.seed})))\n"

    @cached_property
    def loss(self) -> LossFunction:
        """The loss function, to be called."""
        space: dict[str, Any] = {"torch": torch, "F": F}
        exec(self.text, space)  # noqa: S102 - the text is our own
        found: LossFunction = space["loss_fn"]
        return found

    @property
    def windows(self) -> list[list[Batch]]:
        """The micro-batches of each update."""
        return windows(self.sizes, self.seed)

def windows(sizes: Sequence[Sequence[int]], seed: int) -> list[list[Batch]]:
    """The micro-batches of each update."""
    return [micro_batches(window, 100 * seed + number) for number, window in enumerate(sizes)]

def is_usable(value: Any) -> bool:
    """Whether a value is a small tensor of finite numbers that a model was trained for."""
    if not isinstance(value, Tensor) or not value.requires_grad or not value.is_floating_point():
        return False
    return 0 < value.numel() < 3000 and 0 < float(value.detach().abs().max()) < 1e3

class _Drawing:
    """One program being drawn: what was written so far, and the shapes that it has for two batch sizes."""

    def __init__(self, draw: random.Random, kind: str) -> None:
        self.draw, self.kind = draw, kind
        sources = {each: weight for each, weight in SOURCES.items() if kind != "apart" or each not in REFUSED}
        self.source = draw.choices(list(sources), list(sources.values()))[0]
        self.lines: list[str] = []
        self.in_model = True  # nothing but layers so far, and what acts element by element
        self.spaces: list[dict[str, Any]] = [{"torch": torch, "F": F, "m": Model(), "b": micro_batches([n], 3)[0], "n": n} for n in PROBES]
        assert self.ran(f"x = y = {self.source}")

    def ran(self, line: str) -> bool:
        """Whether a line runs on both batches, and leaves something that is small, finite and trained."""
        kept = [dict(space) for space in self.spaces]
        try:
            for space in self.spaces:
                exec(line, space)  # noqa: S102 - the text is our own
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
            self.spaces = kept
        values = [space[name] for space in self.spaces for name in ("x", "y", "loss") if name in space]
        if self.spaces is not kept and all(map(is_usable, values)) and (self.kind != "apart" or self.is_apart()):
            return True
        self.spaces = kept
        return False

    def is_apart(self) -> bool:
        """Whether the samples have one axis, which is theirs alone."""
        few, many = (space["x"].shape for space in self.spaces)
        return [(a, b) for a, b in zip(few, many, strict=False) if a != b] == [PROBES]

    def write(self, line: str) -> bool:
        """Append a line, if it runs."""
        if self.ran(line):
            self.lines.append(line)
            return True
        return False

    def filled(self, template: str) -> str | None:
        """A template with its dimensions drawn, or None where the output has none to fill it."""
        few, many = self.spaces[0]["x"].shape, self.spaces[1]["x"].shape
        if len(few) != len(many) or not few:
            return None
        grown = [d for d, (a, b) in enumerate(zip(few, many, strict=True)) if a != b]
        own = grown[0] if grown else 0
        dims = [d for d in range(len(few)) if d not in grown]
        if "{d}" in template and (not dims or self.draw.random() < 0.08):
            dims = list(range(len(few))) if template not in INNER_LINES and self.kind != "apart" else dims
        if not dims and "{d}" in template:
            return None
        d, e = (self.draw.choice(dims) if dims else 0), self.draw.randrange(len(few))
        if "{n1}" in template and (len(grown) != 1 or (few[own], many[own]) != PROBES):
            return None
        view = ", ".join("n" if i == own else "1" for i in range(len(few)))
        for key, text in {"{d}": d, "{e}": e, "{o}": own, "{n1}": view, "{f}": f"x.shape[{d}]"}.items():
            template = template.replace(key, str(text))
        return template

    def shape(self) -> str:
        """The shape of the output in letters."""
        letters = {PROBES[0]: "n", STEPS: "T", CLASSES: "C", 1: "1"}
        return "".join(letters.get(size, "?") for size in self.spaces[0]["x"].shape)


INNER_LINES = set(_lines(INNER))
GROUPS = [(POINTWISE, 5), (DATA, 3), (ALONG, 6), (INNER, 3), (COUPLING, 1), (SHAPES, 4)]

def drawn(seed: int, number: int, kind: str = "any") -> Program:
    """The program of this number, the same for the same seed.

    Kinds: `any`; `apart`, of operations that leave each sample alone; `deep`, with layers above what mixes samples.
    """
    draw = random.Random(f"{seed}-{number}")  # noqa: S311 - no secret
    drawing = _Drawing(draw, kind)
    for _ in range(draw.randint(1, 6)):
        for _ in range(20):
            if _operation(drawing):
                break
        if draw.random() < 0.15:
            drawing.write("y = x")
    while not _end(drawing):
        pass
    above = [each for each in _lines(ABOVE) if each not in REFUSED] if kind == "apart" else _lines(ABOVE + "|" + NONLINEAR)
    for _ in range(draw.choice((0, 0, 0, 1, 1, 2))):
        drawing.write(f"loss = {draw.choice(above)}")
    smallest = 2 if kind == "apart" else 1  # of one sample a graph does not always show where it lies
    sizes = tuple(tuple(draw.randint(smallest, 5) for _ in range(3)) for _ in range(2))
    sizes = tuple(window if max(window) > 1 else (2, 1, 3) for window in sizes)
    return Program(drawing.source, tuple(drawing.lines), sizes, draw.randrange(1000))

def _operation(drawing: _Drawing) -> bool:
    draw, shape, kind = drawing.draw, drawing.shape(), drawing.kind
    tables = [(_lines(text), weight) for text, weight in GROUPS if kind != "apart" or text is not COUPLING]
    layers = shape.endswith("C") and (drawing.in_model or kind == "deep")
    tables += [(_lines(LAYERS), 5)] if layers else []
    tables += [(_lines(COUPLING_PAIRS), 1)] if _fits("n?", shape) and kind != "apart" else []
    tables += [(_lines(text), 4 if len(key) > 2 else 3) for key, text in BY_SHAPE.items() if _fits(key, shape)]
    table = draw.choices([table for table, _ in tables], [weight for _, weight in tables])[0]
    template = draw.choice(table)
    reshapes = "reshape" in template or "flatten" in template  # of samples that lie elsewhere they mix them
    if kind == "apart" and (template in REFUSED or (reshapes and not _fits("n?", shape))):
        return False
    line = drawing.filled(template)
    if line is None or not drawing.write(f"x = {line}"):
        return False
    drawing.in_model = drawing.in_model and table in (_lines(LAYERS), _lines(POINTWISE))
    return True

def _end(drawing: _Drawing) -> bool:
    if drawing.kind == "apart" and not drawing.shape().startswith("n"):
        drawing.write(f"x = {drawing.filled('x.movedim({o}, 0)')}")
    tables = [_lines(ENDS)] + [_lines(text) for key, text in ENDS_BY_SHAPE.items() if _fits(key, drawing.shape())]
    template = drawing.draw.choice(drawing.draw.choice(tables))
    if drawing.kind == "apart" and (template in REFUSED or (drawing.shape() == "n" and "-1" in template)):
        return False
    line = drawing.filled(template) if drawing.shape() else "x"
    return line is not None and drawing.write(f"loss = {line}") and not drawing.spaces[0]["loss"].dim()

def _fits(key: str, shape: str) -> bool:
    if key == "...C":
        return shape.endswith("C")
    if key == "n?":
        return shape.startswith("n") and len(shape) > 1
    return key == "once" or (shape == key if key in {"nTC", "nC", "n1"} else shape.startswith(key))

def is_fair(program: Program) -> bool:
    """Whether a program runs on its own micro-batches, and has a gradient that is finite and not all zero."""
    loss, model = program.loss, Model()
    try:
        for window in program.windows:
            norms = [float(plain(model, loss, batch).norm()) for batch in [*window, join(window)]]
            if not all(norm < 1e4 for norm in norms) or not loss(model, join(window)).isfinite() or not norms[-1] > 1e-6:
                return False
    except (RuntimeError, IndexError):
        return False
    return True

def fair(seed: int, first: int, count: int, kind: str = "any") -> Iterator[Program]:
    """So many programs that are fair, from the one of this number on."""
    found = (program for number in itertools.count(first) if is_fair(program := drawn(seed, number, kind)))
    return itertools.islice(found, count)

def verdict(program: Program) -> Verdict:
    """What an Accumulator makes of a program."""
    return judge(Model(), program.loss, program.windows)

def verdict_of_big_step(program: Program, *, check: bool) -> Verdict:
    """What a BigStep makes of it."""
    return judge_big_step(Model(), program.loss, program.windows, max(program.sizes[0][0], 2), check=check)

def could_be_exact(program: Program) -> bool:
    """Whether counts that a person could give make the parts add up to the big batch."""

    def counts(batch: Batch) -> list[float]:
        masks = [batch["keep"], batch["pick"], batch["last"] != 1, batch["label"] != 2, batch["last"][:, 1:] != 1]
        return [len(batch["x"]), *(float(mask.sum()) for mask in masks)]

    return adds_up(Model(), program.loss, program.windows, counts)

def shrunk(program: Program, judge: Callable[[Program], Verdict]) -> Program:
    """The program without the lines, updates and micro-batches that its outcome does not need."""
    outcome, lines, updates = judge(program).outcome, program.lines, program.sizes
    shorter = [replace(program, lines=(*lines[:i], *lines[i + 1 :])) for i in range(len(lines))]
    shorter += [replace(program, sizes=part) for part in (updates[:1], updates[1:]) if len(updates) > 1]
    for each in shorter:
        with suppress(NameError, SyntaxError, TypeError, ValueError, AttributeError, RuntimeError, IndexError):
            if is_fair(each) and judge(each).outcome == outcome:
                return shrunk(each, judge)
    return program
