"""Run the nightly jobs in steps. (Nothing here learns anything.)"""

import logging
import time
from dataclasses import dataclass, field

log = logging.getLogger(__name__)


@dataclass
class Scheduler:
    jobs: list = field(default_factory=list)
    ticks: int = 0

    def step(self):
        self.ticks += 1
        for job in self.jobs:
            if self.ticks % job.every == 0:
                job.run()

    def update(self, job):
        self.jobs = [j for j in self.jobs if j.name != job.name] + [job]


def main(scheduler: Scheduler, batches, batch_size=100):
    total = 0
    loss = 0
    for i, rows in enumerate(batches):
        total += len(rows)
        loss += sum(r is None for r in rows)
        if i % batch_size == 0:
            log.info("%d rows, %d lost", total, loss)
        scheduler.step()
        time.sleep(1)
