import math

import numpy as np


class World:
    def __init__(self, dt=0.01):
        self.dt, self.angle, self.speed = dt, 1.0, 0.0

    def step(self):
        self.speed -= 9.81 * math.sin(self.angle) * self.dt
        self.angle += self.speed * self.dt

    def energy(self):
        return 0.5 * self.speed**2 + 9.81 * (1 - math.cos(self.angle))


def simulate(n_steps=10_000, accum=10):
    world, trace, mean = World(), [], 0.0
    for i in range(n_steps):
        world.step()
        mean += world.energy() / accum
        if (i + 1) % accum == 0:
            trace.append(mean)
            mean = 0.0
    return np.asarray(trace)


if __name__ == "__main__":
    drift = simulate()
    print("energy drift", drift[-1] - drift[0])
