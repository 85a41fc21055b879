"""Each rule, beside what looks like its mistake and is none."""

import pytest

from tests.linting import codes, findings, of_loop

# Loops below stand under the names of tests.linting.HEAD: model, optimizer, criterion, scheduler, loader, stream.
LOOPS: dict[str, tuple[str, list[str]]] = {
    "divided, window and tail right": (
        """
        n = len(loader)
        for i, (x, y) in enumerate(loader):
            size = accumulation_steps if i < n - n % accumulation_steps else n % accumulation_steps
            (criterion(model(x), y) / size).backward()
            if (i + 1) % accumulation_steps == 0 or i + 1 == n:
                optimizer.step()
                optimizer.zero_grad()
        """,
        [],
    ),
    "an inner loop that draws its micro-batches": (
        """
        for update in range(1000):
            for micro in range(accumulation_steps):
                x, y = next(stream)
                (criterion(model(x), y) / accumulation_steps).backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
        [],
    ),
    "an inner loop that clears": (
        """
        for update in range(1000):
            for micro in range(accumulation_steps):
                optimizer.zero_grad()
                x, y = next(stream)
                (criterion(model(x), y) / accumulation_steps).backward()
            optimizer.step()
        """,
        ["BB101"],
    ),
    "an inner loop that steps": (
        """
        for update in range(1000):
            optimizer.zero_grad()
            for micro in range(accumulation_steps):
                x, y = next(stream)
                (criterion(model(x), y) / accumulation_steps).backward()
                optimizer.step()
        """,
        ["BB102"],
    ),
    "an inner loop that never divides": (
        """
        for update in range(1000):
            optimizer.zero_grad()
            for micro in range(accumulation_steps):
                x, y = next(stream)
                criterion(model(x), y).backward()
            optimizer.step()
        """,
        ["BB201"],
    ),
    "chunks of a batch, divided by their number": (
        """
        for x, y in loader:
            optimizer.zero_grad()
            for a, b in zip(x.chunk(4), y.chunk(4)):
                (criterion(model(a), b) / 4).backward()
            optimizer.step()
        """,
        [],
    ),
    "chunks of a batch, weighed by their share": (
        """
        for x, y in loader:
            optimizer.zero_grad()
            for a, b in zip(x.split(8), y.split(8)):
                (criterion(model(a), b) * len(a) / len(x)).backward()
            optimizer.step()
        """,
        [],
    ),
    "a masked mean, the mask by its key": (
        """
        for i, batch in enumerate(loader):
            each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
            loss = (each * batch["mask"]).sum() / batch["mask"].sum().clamp(min=1)
            loss = loss / accumulation_steps
            loss.backward()
            if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
        """,
        ["BB104", "BB203"],
    ),
    "a loss that is called mask": (
        """
        for i, batch in enumerate(loader):
            losses = model(batch["x"], batch["y"])
            loss = losses["loss_mask"] + losses["mask"].sum()
            loss = loss / size_of_window(i)
            loss.backward()
            if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
        """,
        [],
    ),
    "a mean times its count, gradients divided by all of them in another file": (
        """
        from training import scale_grads

        tokens = 0
        for i, (x, y) in enumerate(loader):
            n = (y != -100).sum()
            tokens += n
            loss = F.cross_entropy(model(x), y) * n
            loss.backward()
            if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
                scale_grads(model, 1 / tokens)
                optimizer.step()
                optimizer.zero_grad()
                tokens = 0
        """,
        [],
    ),
    "a mean times its count, divided by a count that is known before": (
        """
        for batch in loader:
            total = (batch["labels"] != -100).sum()
            for x, y in micro_batches(batch):
                n = (y != -100).sum()
                (F.cross_entropy(model(x), y) * n / total).backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
        [],
    ),
    "gradients divided in another file": (
        """
        import training

        for i, (x, y) in enumerate(loader):
            criterion(model(x), y).backward()
            if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
                training.scale_grads(model, 1 / (i % accumulation_steps + 1))
                optimizer.step()
                optimizer.zero_grad()
        """,
        [],
    ),
    "a numbered progress bar with a name": (
        """
        from tqdm import tqdm

        for epoch in range(3):
            bar = tqdm(enumerate(loader), total=len(loader))
            for i, (x, y) in bar:
                (criterion(model(x), y) / accumulation_steps).backward()
                if i % accumulation_steps == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                bar.set_description(f"{epoch}")
        """,
        ["BB103", "BB105"],
    ),
    "a numbered progress bar named in the head": (
        """
        from tqdm import tqdm

        for epoch in range(3):
            for i, (x, y) in (bar := tqdm(enumerate(loader))):
                (criterion(model(x), y) / accumulation_steps).backward()
                if i % accumulation_steps == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        """,
        ["BB103", "BB105"],
    ),
    "a progress bar around a numbered loader, if wanted": (
        """
        from tqdm import tqdm

        for epoch in range(3):
            rounds = enumerate(loader)
            if shown:
                rounds = tqdm(rounds)
            for i, (x, y) in rounds:
                (criterion(model(x), y) / accumulation_steps).backward()
                if i % accumulation_steps == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        """,
        ["BB103", "BB105"],
    ),
    "cleared right before the step": (
        """
        for i, (x, y) in enumerate(loader):
            (criterion(model(x), y) / window_size(i)).backward()
            if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
                optimizer.zero_grad()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        """,
        ["BB101"],
    ),
    "cleared right before the step, after an inner loop": (
        """
        for update in range(1000):
            for micro in range(accumulation_steps):
                x, y = next(stream)
                (criterion(model(x), y) / accumulation_steps).backward()
            optimizer.zero_grad()
            optimizer.step()
        """,
        ["BB101"],
    ),
    "cleared before a step whose gradients come from elsewhere": (
        """
        for i, (x, y) in enumerate(loader):
            (criterion(model(x), y) / window_size(i)).backward()
            if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
                optimizer.zero_grad()
                copy_gradients(replica, model)
                optimizer.step()
        """,
        [],
    ),
    "cleared before a step with a closure": (
        """
        for i, (x, y) in enumerate(loader):
            (criterion(model(x), y) / window_size(i)).backward()
            if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
                optimizer.zero_grad()
                optimizer.step(closures[i])
        """,
        [],
    ),
    "another optimizer cleared before the step": (
        """
        for i, (x, y) in enumerate(loader):
            (criterion(model(x), y) / window_size(i)).backward()
            if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
                frozen_optimizer.zero_grad()
                optimizer.step()
                optimizer.zero_grad()
        """,
        [],
    ),
    "a step before this round's backward": (
        """
        for i, (x, y) in enumerate(loader):
            loss = criterion(model(x), y) / accumulation_steps
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
            loss.backward()
        """,
        ["BB103", "BB105"],
    ),
    "a step for the window before, at the top of a round": (
        """
        for i, (x, y) in enumerate(loader):
            if i > 0 and i % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
            (criterion(model(x), y) / window_size(i)).backward()
        optimizer.step()
        optimizer.zero_grad()
        """,
        [],
    ),
    "a step at the top of a round, counted by something unseen": (
        """
        for x, y in loader:
            if counter.count % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
            (criterion(model(x), y) / window_size(i)).backward()
        optimizer.step()
        """,
        [],
    ),
    "a count that is set back at the top of a round": (
        """
        held = 0
        for x, y in loader:
            if held == accumulation_steps:
                optimizer.step()
                optimizer.zero_grad()
                held = 0
            (criterion(model(x), y) / window_size()).backward()
            held += 1
        optimizer.step()
        """,
        [],
    ),
    "a loader that is numbered under its own name": (
        """
        loader = enumerate(loader)
        for i, (x, y) in loader:
            (criterion(model(x), y) / accumulation_steps).backward()
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
        """,
        ["BB103"],
    ),
    "several losses in a loop of their own": (
        """
        for x, y in loader:
            optimizer.zero_grad()
            for loss in losses_of(model, x, y):
                loss.backward(retain_graph=True)
            optimizer.step()
        """,
        [],
    ),
    "minibatches of a rollout, a step each": (
        """
        for rollout in rollouts:
            for minibatch in rollout.minibatches(64):
                optimizer.zero_grad()
                policy_loss(model, minibatch).backward()
                optimizer.step()
        """,
        [],
    ),
    "a whole epoch per step": (
        """
        for epoch in range(10):
            optimizer.zero_grad()
            for x, y in loader:
                (criterion(model(x), y) / len(loader)).backward()
            optimizer.step()
        """,
        [],
    ),
    "the gradient divided instead of the loss": (
        """
        for i, (x, y) in enumerate(loader):
            criterion(model(x), y).backward()
            if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
                for p in model.parameters():
                    p.grad /= accumulation_steps
                optimizer.step()
                optimizer.zero_grad()
        """,
        [],
    ),
    "loss and gradient divided": (
        """
        for i, (x, y) in enumerate(loader):
            (criterion(model(x), y) / accumulation_steps).backward()
            if (i + 1) % accumulation_steps == 0:
                for p in model.parameters():
                    if p.grad is not None:
                        p.grad.div_(accumulation_steps)
                optimizer.step()
                optimizer.zero_grad()
        """,
        ["BB103", "BB202"],
    ),
    "a sum needs no division": (
        """
        for i, (x, y) in enumerate(loader):
            F.cross_entropy(model(x), y, reduction="sum").backward()
            if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
        """,
        [],
    ),
    "multiplied by one over the steps": (
        """
        scale = 1.0 / accumulation_steps
        for i, (x, y) in enumerate(loader):
            (criterion(model(x), y) * scale).backward()
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
        """,
        ["BB103"],
    ),
    "multiplied by the number itself": (
        """
        for i, (x, y) in enumerate(loader):
            (0.25 * criterion(model(x), y)).backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
        """,
        ["BB103"],
    ),
    "divided by a method, in place": (
        """
        for i, (x, y) in enumerate(loader):
            loss = criterion(model(x), y)
            loss.div_(accumulation_steps)
            loss.backward()
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
        """,
        ["BB103"],
    ),
    "divided twice": (
        """
        for i, (x, y) in enumerate(loader):
            loss = criterion(model(x), y) / accumulation_steps
            scaled = loss / accumulation_steps
            scaled.backward()
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
        """,
        ["BB103", "BB202"],
    ),
    "divided for the log alone": (
        """
        for i, (x, y) in enumerate(loader):
            loss = criterion(model(x), y)
            loss.backward()
            log(loss.detach() / accumulation_steps)
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
        """,
        ["BB103", "BB201"],
    ),
    "two weighted terms, never divided": (
        """
        for i, (x, y) in enumerate(loader):
            out = model(x)
            loss = criterion(out, y) + 0.1 * out.pow(2).mean()
            loss.backward()
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
        """,
        ["BB103", "BB201"],
    ),
    "cleared at the start of a window": (
        """
        for i, (x, y) in enumerate(loader):
            if i % accumulation_steps == 0:
                optimizer.zero_grad()
            (criterion(model(x), y) / accumulation_steps).backward()
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
        """,
        ["BB103"],
    ),
    "stepped when the next window opens": (
        """
        assert len(loader) % accumulation_steps == 0
        for i, (x, y) in enumerate(loader):
            if i % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
            (criterion(model(x), y) / accumulation_steps).backward()
        optimizer.step()
        """,
        [],
    ),
    "cleared by hand": (
        """
        for x, y in loader:
            for p in model.parameters():
                p.grad = None
            criterion(model(x), y).backward()
            optimizer.step()
        """,
        [],
    ),
    "never cleared": (
        """
        for x, y in loader:
            criterion(model(x), y).backward()
            optimizer.step()
        """,
        ["BB106"],
    ),
    "cleared once, before all": (
        """
        optimizer.zero_grad()
        for epoch in range(3):
            for x, y in loader:
                criterion(model(x), y).backward()
                optimizer.step()
        """,
        ["BB106"],
    ),
    "perhaps cleared by a function that is not here": (
        """
        for x, y in loader:
            criterion(model(x), y).backward()
            optimizer.step()
            tidy_up(optimizer)
        """,
        [],
    ),
    "clipped in every round": (
        """
        for i, (x, y) in enumerate(loader):
            (criterion(model(x), y) / accumulation_steps).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
        """,
        ["BB103", "BB301"],
    ),
    "scheduled in every round": (
        """
        for i, (x, y) in enumerate(loader):
            (criterion(model(x), y) / accumulation_steps).backward()
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
        """,
        ["BB103", "BB304"],
    ),
    "scheduled once per epoch": (
        """
        for epoch in range(3):
            for i, (x, y) in enumerate(loader):
                (criterion(model(x), y) / accumulation_steps).backward()
                if (i + 1) % accumulation_steps == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            scheduler.step()
        """,
        ["BB103"],
    ),
    "the running loss with its graph": (
        """
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss
        """,
        ["BB501"],
    ),
    "the running loss without": (
        """
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        """,
        [],
    ),
    "terms added up before one backward": (
        """
        for batch in loader:
            optimizer.zero_grad()
            total = 0.0
            for x, y in batch:
                total += criterion(model(x), y)
            total = total / len(batch)
            total.backward()
            optimizer.step()
        """,
        [],
    ),
    "read in every round": (
        """
        for i, (x, y) in enumerate(loader):
            loss = criterion(model(x), y) / accumulation_steps
            loss.backward()
            print(f"{loss:.3f}")
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
        """,
        ["BB103"],
    ),
    "read once per window": (
        """
        for i, (x, y) in enumerate(loader):
            loss = criterion(model(x), y) / accumulation_steps
            loss.backward()
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
                print(loss.item())
        """,
        ["BB103"],
    ),
    "a masked mean": (
        """
        for i, (x, y) in enumerate(loader):
            mask = y != -100
            each = F.cross_entropy(model(x), y, reduction="none")
            loss = (each * mask).sum() / mask.sum().clamp(min=1)
            (loss / accumulation_steps).backward()
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
        """,
        ["BB103", "BB203"],
    ),
    "a masked sum over the window's count": (
        """
        for window in windows:
            tokens = sum((y != -100).sum() for _, y in window)
            for x, y in window:
                (F.cross_entropy(model(x), y, reduction="sum", ignore_index=-100) / tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
        [],
    ),
    "a schedule that is told where it stands": (
        """
        for epoch in range(3):
            for i, (x, y) in enumerate(cycle(loader)):
                (criterion(model(x), y) / accumulation_steps).backward()
                if (i + 1) % accumulation_steps == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                scheduler.step(epoch + i / 1000)
        """,
        [],
    ),
    "cleared by filling with zeros": (
        """
        for x, y in loader:
            criterion(model(x), y).backward()
            optimizer.step()
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
        """,
        [],
    ),
    "a sum that keeps no graph": (
        """
        total = torch.zeros(())
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                total += loss
        """,
        [],
    ),
    "an optimizer that accumulates by itself": (
        """
        optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1), accumulate=accumulation_steps)
        waiting = StepOptimizer(model.parameters(), accumulation_steps=accumulation_steps)
        for x, y in loader:
            waiting.zero_grad()
            (criterion(model(x), y) / accumulation_steps).backward()
            waiting.step()
        """,
        [],
    ),
    "a gradient from outside": (
        """
        for i, (x, y) in enumerate(cycle(loader)):
            features = model(x)
            features.backward(gradient=cached[i])
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
        """,
        [],
    ),
    "cleared at the first micro-step": (
        """
        for update in range(1000):
            for micro in range(accumulation_steps):
                if micro == 0:
                    optimizer.zero_grad()
                x, y = next(stream)
                (criterion(model(x), y) / accumulation_steps).backward()
                if micro == accumulation_steps - 1:
                    optimizer.step()
        """,
        [],
    ),
    "a counter that goes on from epoch to epoch": (
        """
        step = 0
        for epoch in range(3):
            for x, y in loader:
                (criterion(model(x), y) / max(1, accumulation_steps)).backward()
                step += 1
                if step % accumulation_steps == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        """,
        [],
    ),
    "the same, set to 0 with each epoch": (
        """
        for epoch in range(3):
            step = 0
            for x, y in loader:
                (criterion(model(x), y) / max(1, accumulation_steps)).backward()
                step += 1
                if step % accumulation_steps == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        """,
        ["BB103"],
    ),
    "a GAN whose generator waits": (
        """
        for i, real in enumerate(loader):
            opt_d.zero_grad()
            d_loss(real).backward()
            opt_d.step()
            if i % 5 == 0:
                opt_g.zero_grad()
                g_loss().backward()
                opt_g.step()
        """,
        [],
    ),
    "every n-th batch alone": (
        """
        for i, (x, y) in enumerate(loader):
            if i % 10 == 0:
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()
        """,
        [],
    ),
}


@pytest.mark.parametrize(("loop", "expected"), LOOPS.values(), ids=LOOPS)
def test_loops(loop: str, expected: list[str]) -> None:
    """Exactly what is wrong is found."""
    assert of_loop(loop) == expected


SCRIPTS: dict[str, tuple[str, list[str]]] = {
    "a method of its own for the micro-batch": (
        """
        class Trainer:
            def __init__(self, model, optimizer, criterion, grad_acc=8):
                self.model, self.optimizer, self.criterion = model, optimizer, criterion
                self.grad_acc = grad_acc

            def train_one_batch(self, batch):
                self.optimizer.zero_grad()
                loss = self.criterion(self.model(batch[0]), batch[1]) / self.grad_acc
                loss.backward()
                return loss.detach()

            def fit(self, loader):
                for i, batch in enumerate(loader):
                    self.train_one_batch(batch)
                    if (i + 1) % self.grad_acc == 0 or i + 1 == len(loader):
                        self.optimizer.step()
        """,
        ["BB101", "BB104"],
    ),
    "a function that is told whether to step": (
        """
        def micro_step(model, optimizer, batch, n, update):
            (model(batch).mean() / n).backward()
            if update:
                optimizer.step()
                optimizer.zero_grad()

        def train(model, optimizer, loader, n_accum):
            for i, batch in enumerate(loader):
                micro_step(model, optimizer, batch, n_accum, update=(i + 1) % n_accum == 0)
        """,
        ["BB103"],
    ),
    "a helper that asks": (
        """
        ACCUM = 4

        def is_boundary(i):
            return (i + 1) % ACCUM == 0

        def train(model, optimizer, loader):
            for i, batch in enumerate(loader):
                optimizer.zero_grad()
                (model(batch).mean() / ACCUM).backward()
                if is_boundary(i):
                    optimizer.step()
        """,
        ["BB101", "BB103"],
    ),
    "the caller clears": (
        """
        def train_epoch(model, optimizer, loader, steps):
            for i, batch in enumerate(loader):
                (model(batch).mean() / steps).backward()
                if (i + 1) % steps == 0:
                    apply(optimizer)

        def apply(optimizer):
            optimizer.step()
            optimizer.zero_grad()
        """,
        ["BB103"],
    ),
    "DDP that talks in every round": (
        """
        from torch.nn.parallel import DistributedDataParallel as DDP

        def train(model, optimizer, loader, accum_iter):
            model = DDP(model)
            for i, batch in enumerate(loader):
                (model(batch).mean() / accum_iter).backward()
                if (i + 1) % accum_iter == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        """,
        ["BB103", "BB401"],
    ),
    "DDP with no_sync around both": (
        """
        import contextlib
        from torch.nn.parallel import DistributedDataParallel

        def train(model, optimizer, loader, accum_iter):
            model = DistributedDataParallel(model)
            for i, batch in enumerate(loader):
                last = (i + 1) % accum_iter == 0
                with contextlib.nullcontext() if last else model.no_sync():
                    (model(batch).mean() / accum_iter).backward()
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
        """,
        ["BB103"],
    ),
    "DDP with no_sync too late": (
        """
        import contextlib
        from torch.nn.parallel import DistributedDataParallel

        def train(model, optimizer, loader, accum_iter):
            model = DistributedDataParallel(model)
            for i, batch in enumerate(loader):
                last = (i + 1) % accum_iter == 0
                loss = model(batch).mean() / accum_iter
                with contextlib.nullcontext() if last else model.no_sync():
                    loss.backward()
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
        """,
        ["BB103", "BB402"],
    ),
    "a scaler in the wrong places": (
        """
        def train(model, optimizer, scaler, loader, accum):
            for i, batch in enumerate(loader):
                scaler.scale(model(batch).mean() / accum).backward()
                scaler.unscale_(optimizer)
                if (i + 1) % accum == 0:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    scaler.step(optimizer)
                    optimizer.zero_grad()
                scaler.update()
        """,
        ["BB103", "BB302", "BB303"],
    ),
    "Accelerate, as documented": (
        """
        from accelerate import Accelerator

        accelerator = Accelerator(gradient_accumulation_steps=4)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        """,
        [],
    ),
    "Accelerate, divided again and clipped always": (
        """
        from accelerate import Accelerator

        accelerator = Accelerator(gradient_accumulation_steps=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss / 4
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        """,
        ["BB202", "BB301"],
    ),
    "Lightning, divided again": (
        """
        import lightning as L

        class Model(L.LightningModule):
            def training_step(self, batch, batch_idx):
                return self.net(batch).mean() / self.trainer.accumulate_grad_batches

        L.Trainer(accumulate_grad_batches=8)
        """,
        ["BB202"],
    ),
    "Lightning, as documented": (
        """
        import lightning as L

        class Model(L.LightningModule):
            def training_step(self, batch, batch_idx):
                loss = self.net(batch).mean()
                self.log("loss", loss)
                return loss

        L.Trainer(accumulate_grad_batches=8)
        """,
        [],
    ),
    "Trainer, divided again, by a model that takes no loss arguments": (
        """
        from torch import nn
        from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

        class Net(nn.Module):
            def forward(self, x, labels):
                return Output(self.net(x), labels)

        class Mine(Trainer):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                outputs = model(**inputs)
                loss = outputs.loss / self.args.gradient_accumulation_steps
                return (loss, outputs) if return_outputs else loss

        model = Net()
        Mine(model, TrainingArguments("out", gradient_accumulation_steps=8)).train()
        """,
        ["BB202"],
    ),
    "Trainer, divided by hand for a model that takes loss arguments": (
        """
        from torch import nn
        from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

        class Net(nn.Module):
            def forward(self, x, labels, **kwargs):
                return Output(self.net(x), labels)

        class Mine(Trainer):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                outputs = model(**inputs)
                loss = outputs.loss / self.args.gradient_accumulation_steps
                return (loss, outputs) if return_outputs else loss

        model = Net()
        Mine(model, TrainingArguments("out", gradient_accumulation_steps=8)).train()
        """,
        [],
    ),
    "Trainer, divided by hand for a language model, for which it does not divide": (
        """
        from torch import nn
        from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

        class Mine(Trainer):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                outputs = model(**inputs)
                loss = outputs.loss / self.args.gradient_accumulation_steps
                return (loss, outputs) if return_outputs else loss

        model = AutoModelForCausalLM.from_pretrained("gpt2")
        Mine(model, TrainingArguments("out", gradient_accumulation_steps=8)).train()
        """,
        [],
    ),
    "Trainer, told that the loss is divided": (
        """
        from torch import nn
        from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

        class Net(nn.Module):
            def forward(self, x, labels):
                return Output(self.net(x), labels)

        class Mine(Trainer):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                outputs = model(**inputs)
                loss = outputs.loss / self.args.gradient_accumulation_steps
                return (loss, outputs) if return_outputs else loss

        model = Net()
        Mine(model, TrainingArguments("out", gradient_accumulation_steps=8), compute_loss_func=mean).train()
        """,
        [],
    ),
    "Accelerate, told of steps and never asked to accumulate": (
        """
        from accelerate import Accelerator

        accelerator = Accelerator(gradient_accumulation_steps=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        """,
        ["BB102"],
    ),
    "Accelerate, not told of steps": (
        """
        from accelerate import Accelerator

        accelerator = Accelerator()
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        """,
        [],
    ),
    "Accelerate, told of one step": (
        """
        from accelerate import Accelerator

        accelerator = Accelerator(gradient_accumulation_steps=1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        """,
        [],
    ),
    "Accelerate, whose engine accumulates": (
        """
        from accelerate import Accelerator

        accelerator = Accelerator(gradient_accumulation_steps=4, deepspeed_plugin=plugin)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        """,
        [],
    ),
    "Accelerate, accumulating": (
        """
        from accelerate import Accelerator

        accelerator = Accelerator(gradient_accumulation_steps=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
        """,
        [],
    ),
    "Accelerate, accumulating where this file does not see": (
        """
        from accelerate import Accelerator

        accelerator = Accelerator(gradient_accumulation_steps=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            context = accelerator.accumulate(model)
            context.__enter__()
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            context.__exit__(None, None, None)
        """,
        [],
    ),
    "a running loss with its graph beside Accumulator": (
        """
        from bigbatch import Accumulator

        accumulator = Accumulator(model, optimizer, steps=4)
        for x, y in accumulator.over(loader):
            loss = criterion(model(x), y)
            update = accumulator.backward(loss)
            total += loss
        """,
        ["BB501"],
    ),
    "a list of losses with their graphs beside Accumulator": (
        """
        from bigbatch import Accumulator

        accumulator = Accumulator(model, optimizer, steps=4)
        for x, y in accumulator.over(loader):
            loss = criterion(model(x), y)
            update = accumulator.backward(loss)
            losses.append(loss)
        """,
        ["BB501"],
    ),
    "a running loss without its graph beside Accumulator": (
        """
        from bigbatch import Accumulator

        accumulator = Accumulator(model, optimizer, steps=4)
        for x, y in accumulator.over(loader):
            loss = criterion(model(x), y)
            update = accumulator.backward(loss)
            total += loss.detach()
        """,
        [],
    ),
    "the losses of updates beside Accumulator": (
        """
        from bigbatch import Accumulator

        accumulator = Accumulator(model, optimizer, steps=4)
        for x, y in accumulator.over(loader):
            loss = criterion(model(x), y)
            update = accumulator.backward(loss)
            losses.append(update.loss) if update else None
        """,
        [],
    ),
    "losses as numbers beside Accumulator": (
        """
        from bigbatch import Accumulator

        accumulator = Accumulator(model, optimizer, steps=4)
        for x, y in accumulator.over(loader):
            loss = criterion(model(x), y)
            update = accumulator.backward(loss)
            losses.append(loss.item())
        """,
        [],
    ),
    "BatchNorm in a model that is evaluated while it learns": (
        """
        from torch import nn

        net = build(nn.BatchNorm1d)
        head = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 2))
        network.eval()
        for i, (x, y) in enumerate(loader):
            (crit(network(x), y) / size_of_window(i)).backward()
            if (i + 1) % 4 == 0 or i + 1 == len(loader):
                opt.step()
                opt.zero_grad()
        """,
        [],
    ),
    "BatchNorm in a model that is evaluated and trained": (
        """
        from torch import nn

        head = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 2))
        network = wrapped(head)
        network.train()
        for i, (x, y) in enumerate(loader):
            (crit(network(x), y) / size_of_window(i)).backward()
            if (i + 1) % 4 == 0 or i + 1 == len(loader):
                opt.step()
                opt.zero_grad()
        network.eval()
        """,
        ["BB601"],
    ),
    "DeepSpeed, told of steps in a dict, divided again": (
        """
        import deepspeed

        config = {"train_batch_size": 64, "gradient_accumulation_steps": 4}
        engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)
        for batch in loader:
            loss = engine(batch) / 4
            engine.backward(loss)
            engine.step()
        """,
        ["BB202"],
    ),
    "DeepSpeed, told of other steps than a loss is divided by": (
        """
        import deepspeed

        engine, optimizer, _, _ = deepspeed.initialize(model=model, config={"gradient_accumulation_steps": 4})
        for batch in loader:
            loss = engine(batch) / 2
            engine.backward(loss)
            engine.step()
        """,
        [],
    ),
    "DeepSpeed, told not to divide": (
        """
        import deepspeed

        engine, optimizer, _, _ = deepspeed.initialize(model=model, config={"gradient_accumulation_steps": 4})
        for batch in loader:
            loss = engine(batch) / 4
            engine.backward(loss, scale_wrt_gas=False)
            engine.step()
        """,
        [],
    ),
    "BatchNorm in an accumulating loop": (
        """
        from torch import nn

        net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        for i, (x, y) in enumerate(loader):
            (crit(net(x), y) / 4).backward()
            if (i + 1) % 4 == 0 or i + 1 == len(loader):
                opt.step()
                opt.zero_grad()
        """,
        ["BB104", "BB601"],
    ),
    "BatchNorm in a plain loop": (
        """
        from torch import nn

        net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        for x, y in loader:
            opt.zero_grad()
            crit(net(x), y).backward()
            opt.step()
        """,
        [],
    ),
    "a method that cannot be seen may clear, and unscale": (
        """
        class Mine(Base):
            def fit(self, loader):
                for batch in loader:
                    self.scaler.scale(self.model(batch).mean()).backward()
                    self.clip_gradients(1.0)
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
                    self.reset_gradients()
        """,
        [],
    ),
    "a backbone that is only evaluated": (
        """
        from torchvision.models import resnet50

        backbone = resnet50(weights="DEFAULT")
        backbone.eval()
        for i, (x, y) in enumerate(cycle(loader)):
            (criterion(head(backbone(x)), y) / accum).backward()
            if (i + 1) % accum == 0:
                optimizer.step()
                optimizer.zero_grad()
        """,
        [],
    ),
    "this library": (
        """
        from bigbatch import Accumulator

        accumulator = Accumulator(model, optimizer, steps=4)
        for x, y in accumulator.over(loader):
            accumulator.backward(criterion(model(x), y))
        """,
        [],
    ),
    "another library with the same words": (
        """
        import paddle

        for i, (x, y) in enumerate(loader):
            loss = model(x).mean()
            loss.backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.clear_grad()
        """,
        [],
    ),
}


@pytest.mark.parametrize(("script", "expected"), SCRIPTS.values(), ids=SCRIPTS)
def test_scripts(script: str, expected: list[str]) -> None:
    """Functions, methods, frameworks: exactly what is wrong is found."""
    assert codes(script) == expected


def test_a_finding_says_where_and_what() -> None:
    """Line and column from 1, a sentence, and what to do."""
    script = "for x in loader:\n    loss = net(x)\n    loss.backward()\n    opt.step()\n"
    (found,) = findings(script)
    assert (found.line, found.column, found.end_line, found.cell) == (4, 5, 4, 0)
    assert found.place() == "train.py:4:5"
    assert found.message == "gradients are never cleared: every step also takes those of all steps before"
    assert found.remedy == "call optimizer.zero_grad() after each step"
