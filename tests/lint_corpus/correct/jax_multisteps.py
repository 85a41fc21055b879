import jax
import jax.numpy as jnp
import optax

from flax_model import init_params, loss_fn, stream

k = 4
optimizer = optax.MultiSteps(optax.adamw(3e-4), every_k_schedule=k)
params = init_params(jax.random.key(0))
opt_state = optimizer.init(params)


@jax.jit
def train_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


total_loss = jnp.zeros(())
for step, batch in enumerate(stream("train")):
    params, opt_state, loss = train_step(params, opt_state, batch)
    total_loss += loss
    if step % 100 == 0:
        print(step, float(total_loss) / (step + 1))
